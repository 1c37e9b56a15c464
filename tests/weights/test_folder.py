"""Weights through a folder: whole versions, deltas, and what happens when either side comes late or starts again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmill.errors import DeadlineError, WeightSyncError
from rollmill.weights import FolderReceiver, FolderSender
from rollmill.weights.folder import list_versions


def moved(weights: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Some of the elements, changed."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(each.shape, generator=source) < share, each + 1.0, each)
        for name, each in weights.items()
    }


def made(size: int = 1000) -> dict[str, Tensor]:
    return {"w": torch.randn(size, 3, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(5)}


def read(receiver: FolderReceiver) -> tuple[int, dict[str, Tensor]]:
    into = {name: torch.full_like(each, 7.0) for name, each in made().items()}
    return receiver.receive(into), into


@settings(deadline=None, max_examples=30)
@given(shares=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=12), late=st.integers(0, 11))
def test_any_receiver_has_what_was_sent(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], late: int
) -> None:
    folder, weights = tmp_path_factory.mktemp("sync"), made()
    sender = FolderSender(folder, weights, whole_every=4)
    always, second = FolderReceiver(folder), FolderReceiver(folder)
    for version, share in enumerate(shares):
        weights = moved(weights, share, version)
        sender.send(version, weights)
        for receiver in [always, *([second] if version >= late else [])]:
            got, into = read(receiver)
            assert got == version
            assert all(torch.equal(into[name], weights[name]) for name in weights)


def test_a_small_change_is_sent_in_few_bytes(tmp_path: Path) -> None:
    weights = made(100_000)
    sender = FolderSender(tmp_path, weights, dtype=torch.bfloat16)
    sender.send(0, weights)
    whole = sender.bytes_sent
    sender.send(1, {name: each * (1 + 1e-5) for name, each in weights.items()})
    assert sender.bytes_sent - whole < whole / 10
    assert [each.kind for each in list_versions(tmp_path)] == ["whole", "delta"]


def test_old_versions_are_removed(tmp_path: Path) -> None:
    sender = FolderSender(tmp_path, made(), whole_every=3, keep=2)
    for version in range(10):
        sender.send(version, moved(made(), 0.01, version))
    assert [each.version for each in list_versions(tmp_path)] == [6, 7, 8, 9]


def test_a_receiver_that_missed_removed_versions_starts_from_a_whole_one(tmp_path: Path) -> None:
    sender, receiver = FolderSender(tmp_path, made(), whole_every=3, keep=1), FolderReceiver(tmp_path)
    sender.send(0, made())
    read(receiver)
    for version in range(1, 9):
        sender.send(version, last := moved(made(), 0.01, version))
    assert torch.equal(read(receiver)[1]["w"], last["w"])


def test_a_trainer_that_goes_back_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    sender, receiver = FolderSender(tmp_path, made()), FolderReceiver(tmp_path)
    for version in range(5):
        sender.send(version, moved(made(), 0.01, version))
    assert read(receiver)[0] == 4
    again = FolderSender(tmp_path, made())
    again.send(3, other := moved(made(), 0.5, 99))
    assert [each.version for each in list_versions(tmp_path)] == [0, 1, 2, 3]
    version, into = read(receiver)
    assert version == 3
    assert torch.equal(into["w"], other["w"])
    again.send(4, other := moved(other, 0.01, 98))
    assert torch.equal(read(receiver)[1]["w"], other["w"])


def test_while_it_goes_back_what_is_left_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, seen = [made()], []
    sender = FolderSender(tmp_path, weights[0], whole_every=10)
    for version in range(5):
        sender.send(version, weights[version])
        weights.append(moved(weights[version], 0.1, version))
    unlink = Path.unlink

    def removed(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        version, found = read(FolderReceiver(tmp_path))
        torch.testing.assert_close(found, weights[version], rtol=0, atol=0)
        seen.append(version)

    monkeypatch.setattr(Path, "unlink", removed)
    FolderSender(tmp_path, weights[0]).send(2, weights[2])
    assert seen[:3] == [3, 2, 1]


def test_after_a_failed_write_the_next_version_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = FolderSender(tmp_path, made()), FolderReceiver(tmp_path)
    sender.send(0, made())
    with monkeypatch.context() as patched:
        patched.setattr("rollmill.files.atomic_write", failing)
        with pytest.raises(OSError, match="full"):
            sender.send(1, moved(made(), 0.01, 1))
    sender.send(2, last := moved(made(), 0.02, 2))
    assert [each.kind for each in list_versions(tmp_path)] == ["whole", "whole"]
    assert torch.equal(read(receiver)[1]["w"], last["w"])


def failing(path: Path, data: bytes) -> None:
    raise OSError("full")


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    FolderSender(tmp_path, made()).send(0, made())
    file = list_versions(tmp_path)[0].path
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightSyncError, match=r"000000\.whole\.safetensors: .* checksum"):
        read(FolderReceiver(tmp_path))


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=f"weights in {tmp_path}"):
        read(FolderReceiver(tmp_path, deadline_s=0.01))


def test_an_older_version_can_be_asked_for_and_news_are_told(tmp_path: Path) -> None:
    weights = made()
    sender, receiver = FolderSender(tmp_path, weights, whole_every=3), FolderReceiver(tmp_path)
    assert not receiver.has_newer()
    sent = []
    for version in range(5):
        weights = moved(weights, 0.1, version)
        sent.append(weights)
        sender.send(version, weights)
    assert receiver.has_newer()
    for version in (2, 0, 4):
        into = {name: torch.zeros_like(each) for name, each in weights.items()}
        assert receiver.receive(into, version) == version
        assert all(torch.equal(into[name], sent[version][name]) for name in into)
        assert receiver.has_newer() == (version != 4)
    again = FolderSender(tmp_path, weights)  # a trainer that has gone back to version 4
    again.send(4, weights)
    assert receiver.has_newer()


def test_weights_whose_folder_was_removed_are_published_again(tmp_path: Path) -> None:
    sender, receiver = FolderSender(tmp_path / "weights", made()), FolderReceiver(tmp_path / "weights", deadline_s=0.2)
    for version in range(3):
        sender.send(version, last := moved(made(), 0.01, version))
    read(receiver)
    shutil.rmtree(tmp_path / "weights")
    sender.restore()
    assert [(each.version, each.kind) for each in list_versions(tmp_path / "weights")] == [(2, "whole")]
    for one in (receiver, FolderReceiver(tmp_path / "weights", deadline_s=0.2)):
        version, into = read(one)
        assert version == 2
        assert all(torch.equal(into[name], last[name]) for name in last)
    sender.restore()
    sender.send(3, last)
    (tmp_path / "weights/000002.whole.safetensors").unlink()
    sender.restore()
    assert torch.equal(read(FolderReceiver(tmp_path / "weights", deadline_s=0.2))[1]["w"], last["w"])
    shutil.rmtree(tmp_path / "weights")
    sender.send(4, last := moved(made(), 0.01, 9))
    assert [(each.version, each.kind) for each in list_versions(tmp_path / "weights")] == [(4, "whole")]
    assert torch.equal(read(receiver)[1]["w"], last["w"])
