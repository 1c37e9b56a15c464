"""Components: what leaves comes back bit for bit, and everything that shared memory still shares it."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.toys import toy_model
from torch import Tensor

from rollmill.config.offload import Phase
from rollmill.errors import OffloadError
from rollmill.models.storage import collect_storages, ensure_own_memory
from rollmill.offload import OffloadableTensors, OffloadManager, OffloadPlan, RebuildableComponent
from rollmill.offload.components import ThreadBoundComponent
from rollmill.offload.plan import StorageTier
from rollmill.offload.stores import OffloadStore, PinnedMemoryStore, TempFileStore

CPU = torch.device("cpu")


def on_disk(name: str, tensors: Any, folder: Path, **options: Any) -> OffloadableTensors:
    return OffloadableTensors(name, tensors, {"disk": TempFileStore(folder, name)}, **options)


@pytest.fixture(params=["disk", "memory"])
def copies(request: pytest.FixtureRequest, tmp_path: Path) -> dict[StorageTier, OffloadStore]:
    made: dict[StorageTier, OffloadStore] = {"disk": TempFileStore(tmp_path, "it"), "memory": PinnedMemoryStore()}
    return {request.param: made[request.param]}


def test_a_model_leaves_and_comes_back_with_its_ties_and_views(copies: dict[StorageTier, OffloadStore]) -> None:
    model = toy_model("qwen3", tie_word_embeddings=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {name: weight.detach().clone() for name, weight in parameters.items()}
    embedding = parameters["model.embed_tokens.weight"]
    view, tied = embedding.detach()[3:5], parameters["lm_head.weight"]
    ids = torch.tensor([[1, 2, 3]])
    logits = model(input_ids=ids).logits
    component = OffloadableTensors("policy", model.parameters, copies)
    [place] = copies
    for _ in range(2):
        size = component.bytes()
        assert component.move(place) == size > 0 == component.bytes()
        assert component.move(place) == 0
        assert all(storage.nbytes() == 0 for storage in collect_storages(model.parameters()))
        assert component.move("device") == size == component.bytes()
    now = dict(model.named_parameters(remove_duplicate=False))
    assert all(now[name] is weight for name, weight in parameters.items())
    assert all(torch.equal(now[name], weight) for name, weight in before.items())
    assert torch.equal(view, before["model.embed_tokens.weight"][3:5])
    assert torch.equal(model(input_ids=ids).logits, logits)
    with torch.no_grad():
        embedding[3] = 7
    assert view[0, 0].item() == tied[3, 0].item() == 7
    component.close()


@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from([torch.float32, torch.uint8, torch.bfloat16]))))
def test_any_tensors_come_back(tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, torch.dtype]]) -> None:
    tensors = [torch.randint(0, 250, (count, 3)).to(dtype) for count, dtype in shapes]
    before = [tensor.clone() for tensor in tensors]
    component = on_disk("it", lambda: tensors, tmp_path_factory.getbasetemp())
    component.move("disk")
    read = {address: bytes(copy.tolist()) for address, copy in component.copies().items()}
    component.move("device")
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    assert read == {s._cdata: bytes(s.tolist()) for s in collect_storages(tensors)} or not tensors
    component.close()


def test_memory_of_a_file_is_replaced_by_its_own_and_ties_stay(tmp_path: Path) -> None:
    save_file({"a": torch.arange(10.0)}, tmp_path / "a.safetensors")
    a = load_file(tmp_path / "a.safetensors")["a"]
    half = a[5:]
    assert not a.untyped_storage().resizable()
    ensure_own_memory([a, half])
    assert a.untyped_storage().resizable()
    assert half.data_ptr() == a.data_ptr() + 20
    assert half.tolist() == [5, 6, 7, 8, 9]


def test_a_frozen_copy_is_written_once_until_the_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    written: list[list[float]] = []
    put = TempFileStore.put

    def noted(self: TempFileStore, storages: Any) -> None:
        written.append(weight.tolist())
        put(self, storages)

    monkeypatch.setattr(TempFileStore, "put", noted)
    component = on_disk("reference", lambda: [weight], tmp_path, frozen=True)
    for step in range(4):
        component.move("disk")
        component.move("device")
        assert weight.tolist() == ([1.0] * 4 if step < 2 else [3.0] * 4)
        if step == 1:
            with torch.no_grad():
                weight.copy_(torch.full((4,), 3.0))
    assert written == [[1.0] * 4, [3.0] * 4]


def test_an_optimizer_goes_on_as_if_its_state_had_never_left(tmp_path: Path) -> None:
    def trained(moving: bool) -> Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        adam = torch.optim.AdamW(layer.parameters(), fused=True)
        state = on_disk("optimizer", lambda: [v for s in adam.state.values() for v in s.values()], tmp_path)
        for step in range(4):
            if moving:
                state.move("disk")
                state.move("device")
            layer(torch.full((2, 5), float(step))).square().sum().backward()
            adam.step()
            adam.zero_grad()
        return layer.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_no_files_are_left_even_while_it_is_offloaded(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    component = on_disk("policy", lambda: [weight], tmp_path / "new")
    component.move("disk")
    assert list((tmp_path / "new").iterdir()) == []
    component.move("device")
    assert weight.sum() == 1000


def test_where_there_is_no_room_it_stays(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    weight = torch.ones(1000)
    with pytest.raises(OffloadError, match=r"offload: policy cannot be written to .*file: .* make room there, or"):
        on_disk("policy", lambda: [weight], tmp_path / "file").move("disk")
    assert weight.sum() == 1000


def places(**by_phase: dict[str, StorageTier]) -> OffloadPlan:
    return OffloadPlan({phase: by_phase[phase] for phase in by_phase}, {})  # type: ignore[misc]


def test_a_phase_has_what_it_needs_and_a_checkpoint_reads_what_is_offloaded(tmp_path: Path) -> None:
    model = toy_model("llama", tie_word_embeddings=True)
    expected = copy.deepcopy(model.state_dict())
    policy = torch.ones(3)
    plan = places(
        rollout={"policy": "device", "reference": "disk"}, inference={"policy": "device", "reference": "device"}
    )
    here = [on_disk("reference", model.parameters, tmp_path), on_disk("policy", lambda: [policy], tmp_path)]
    manager = OffloadManager(here, plan, CPU)
    assert manager.enter("rollout")
    assert not manager.enter("rollout")
    assert sum(storage.nbytes() for storage in collect_storages(model.parameters())) == 0
    state = {"reference": model.state_dict(), "numbers": [1, {"policy": policy}]}
    torch.save(manager.whole(state), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 2 * sum(each.nbytes for each in model.parameters()), "ties are kept"
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(read["reference"][name], weight) for name, weight in expected.items())
    assert torch.equal(read["numbers"][1]["policy"], policy)
    assert sum(storage.nbytes() for storage in collect_storages(model.parameters())) == 0, "nothing came back for it"
    manager.enter("inference")
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in expected.items())
    found = manager.metrics()
    assert found.keys() == {
        "memory/rollout",
        "memory/inference",
        "residency/reference/gb",
        "residency/reference/seconds",
    }
    assert found["residency/reference/gb"] == pytest.approx(2 * sum(p.nbytes for p in model.parameters()) / 1e9)
    assert manager.metrics().keys() == {"memory/inference"}
    manager.close()


def test_the_cast_is_made_before_the_policy_leaves(tmp_path: Path) -> None:
    policy, happened = torch.ones(3), list[str]()
    cast = RebuildableComponent(
        "cast",
        lambda: 1,
        destroy=lambda: happened.append("destroyed"),
        make=lambda: happened.append(f"made of {policy.untyped_storage().nbytes()} bytes"),
    )
    plan = places(
        rollout={"policy": "disk", "cast": "device"},
        train={"policy": "device", "cast": "destroyed"},
    )
    manager = OffloadManager([cast, on_disk("policy", lambda: [policy], tmp_path)], plan, CPU)
    phases: list[Phase] = ["train", "rollout", "train", "rollout"]
    for phase in phases:
        manager.enter(phase)
        assert policy.untyped_storage().nbytes() == (0 if phase == "rollout" else 12)
    assert happened == ["destroyed", "made of 12 bytes"] * 2
    manager.close()
    assert policy.tolist() == [1, 1, 1]


def test_what_a_thread_uses_is_moved_between_its_work(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    inner = on_disk("rewards", lambda: [weight], tmp_path)
    with ThreadPoolExecutor(1) as thread:
        component = ThreadBoundComponent(inner, thread)
        sums = []
        for _ in range(20):
            work = thread.submit(lambda: (inner.move("device"), float(weight.sum()))[1])
            component.move("disk")
            sums.append(work.result())
    assert sums == [1000.0] * 20


class Full:
    """Copies on a disk that has no room at first."""

    def __init__(self, inner: OffloadStore) -> None:
        self.inner, self.full = inner, True

    def put(self, storages: Any) -> None:
        if self.full:
            raise OffloadError("no room")
        self.inner.put(storages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_what_had_left_when_another_had_no_room_comes_back_with_the_old_phase(tmp_path: Path) -> None:
    first, second = torch.ones(4), torch.ones(8)
    full = Full(TempFileStore(tmp_path, "second"))
    components = [
        OffloadableTensors("policy", lambda: [], {}),
        on_disk("critic", lambda: [first], tmp_path),
        OffloadableTensors("optimizer", lambda: [second], {"disk": full}),
    ]
    there: dict[str, StorageTier] = {each.name: "device" for each in components}
    offloaded: dict[str, StorageTier] = there | {"critic": "disk", "optimizer": "disk"}
    manager = OffloadManager(components, OffloadPlan({"train": there, "rollout": offloaded}, {}), CPU)
    manager.enter("train")
    with pytest.raises(OffloadError):
        manager.enter("rollout")
    assert first.untyped_storage().nbytes() == 0
    manager.enter("train")
    assert first.tolist() == [1] * 4
    assert second.tolist() == [1] * 8
    manager.close()
