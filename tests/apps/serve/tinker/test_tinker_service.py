"""Checkpoints, sampling, several clients, and refusals of the tinker interface."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from support.tinker_servers import ANN, BASE, BOB, datum, tinker_server
from tinker import types

from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.tinker.adapters import AdapterSettings, SharedBase
from rollmill.apps.serve.tinker.checkpoints import CheckpointStore
from rollmill.apps.serve.tinker.promises import PromiseStore, Result, Turns
from rollmill.apps.serve.tinker.service import TinkerService
from rollmill.apps.serve.web.keys import KeyRateLimiter
from rollmill.config.model import ModelConfig
from rollmill.models.load import load_policy

TEXT = [5, 9, 20, 7, 33, 41, 12, 8]
OTHER = [61, 3, 17, 45, 100, 4]
ADAM = types.AdamParams(learning_rate=1e-2)
ERRORS = (tinker.APIStatusError, tinker.RequestFailedError)


@pytest.fixture(scope="module")
def url(base: Path, checkpoints: Path) -> Iterator[str]:
    with tinker_server({BASE: base, "toys/second": base}, checkpoints) as server:
        yield server.url


@pytest.fixture(scope="module")
def ann(url: str) -> Any:
    return tinker.ServiceClient(base_url=url, api_key=ANN)


@pytest.fixture(scope="module")
def bob(url: str) -> Any:
    return tinker.ServiceClient(base_url=url, api_key=BOB)


def train(client: Any, text: list[int], steps: int) -> list[float]:
    """The log-probs of the text before each step, as one list."""
    found = []
    for _ in range(steps):
        result = client.forward_backward([datum(text)], "cross_entropy")
        client.optim_step(ADAM).result()
        found += result.result().loss_fn_outputs[0]["logprobs"].tolist()
    return found


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_peft_adapter_and_training_goes_on_from_it(ann: Any, base: Path, checkpoints: Path) -> None:
    client = ann.create_lora_training_client(BASE, rank=4, seed=2, user_metadata={"for": "tests"}).result()
    train(client, TEXT, 3)
    path = client.save_state("three", user_metadata={"step": "3"}).result().path
    assert path == f"tinker://{client.model_id}/weights/three"
    resumed = ann.create_training_client_from_state_with_optimizer(path).result()
    fresh = ann.create_training_client_from_state(path).result()
    assert resumed.get_info().lora_rank == 4
    expected = train(client, TEXT, 3)
    assert train(resumed, TEXT, 3) == expected
    without = train(fresh, TEXT, 3)
    assert without[:7] == expected[:7]
    assert without[14:] != expected[14:]

    from peft import PeftModel

    policy = load_policy(ModelConfig(path=base), texts=(), seed=0, device=torch.device("cpu"))
    model = PeftModel.from_pretrained(policy.model, checkpoints / path.removeprefix("tinker://")).eval()
    with torch.no_grad():
        logits = model(torch.tensor([TEXT[:-1]])).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[torch.arange(7), torch.tensor(TEXT[1:])]
    assert logprobs.tolist() == pytest.approx(expected[:7], abs=1e-4)

    rest = tinker.RestClient(base_url=str(ann.holder._base_url), api_key=ANN)
    session = rest.get_session(client.model_id.partition(":")[0]).result()
    assert client.model_id in session.training_run_ids
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == (BASE, 4, {"for": "tests"})
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_unembed) == (BASE, True, 4, False)
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(each.checkpoint_id, each.user_metadata) for each in listed] == [("weights/three", {"step": "3"})]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not (checkpoints / path.removeprefix("tinker://")).exists()
    with pytest.raises(ERRORS, match="there is no checkpoint"):
        ann.create_training_client_from_state(path).result()


def test_named_weights_are_sampled_from_after_a_restart(base: Path, tmp_path: Path) -> None:
    with tinker_server({BASE: base}, tmp_path) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=ANN)
        client = service.create_lora_training_client(BASE, rank=4).result()
        train(client, TEXT, 6)
        path = client.save_weights_for_sampler("six").result().path
        expected = client.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    with tinker_server({BASE: base}, tmp_path) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=ANN)
        sampler = service.create_sampling_client(model_path=path).result()
        assert sampler.get_base_model() == BASE
        found = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
        assert found[0] is None
        assert found[1:] == pytest.approx(expected, abs=1e-5)
        with pytest.raises(ERRORS, match="no state of an optimizer"):
            service.create_training_client_from_state_with_optimizer(path).result()


def test_a_name_is_written_over_only_when_asked(ann: Any) -> None:
    client = ann.create_lora_training_client(BASE, rank=4).result()
    client.save_state("same").result()
    with pytest.raises(ERRORS, match="there is a checkpoint 'same' already"):
        client.save_state("same").result()
    assert client.save_state("same", overwrite=True).result().path.endswith("/same")


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".hidden", "x" * 129])
def test_a_name_cannot_leave_the_folder(name: str, ann: Any, checkpoints: Path) -> None:
    client = ann.create_lora_training_client(BASE, rank=4).result()
    before = sorted(checkpoints.parent.rglob("*"))
    if name:
        with pytest.raises(ERRORS, match="a checkpoint's name"):
            client.save_state(name).result()
        assert sorted(checkpoints.parent.rglob("*")) == before
    for path in (f"tinker://{client.model_id}/weights/{name}", "tinker://../weights/x", "tinker://a/b/c", "/etc"):
        with pytest.raises(ERRORS, match="checkpoint"):
            ann.create_training_client_from_state(path).result()


# -- clients -----------------------------------------------------------------------------------------------------------


def test_clients_that_take_turns_do_not_change_each_other(ann: Any, bob: Any) -> None:
    alone = [
        train(ann.create_lora_training_client(BASE, rank=4, seed=seed).result(), text, 3)
        for seed, text in ((1, TEXT), (2, OTHER))
    ]
    first = ann.create_lora_training_client(BASE, rank=4, seed=1).result()
    second = bob.create_lora_training_client("toys/second", rank=4, seed=2).result()
    together: list[list[float]] = [[], []]
    for _ in range(3):
        pending = [
            (client.forward_backward([datum(text)], "cross_entropy"), client.optim_step(ADAM))
            for client, text in ((first, TEXT), (second, OTHER))
        ]
        for kept, (gradients, step) in zip(together, pending, strict=True):
            step.result()
            kept += gradients.result().loss_fn_outputs[0]["logprobs"].tolist()
    assert together == alone


def test_adapters_share_the_weights_of_one_base(base: Path) -> None:
    shared = SharedBase(base, torch.device("cpu"), "fp32")
    before = {name: weight.clone() for name, weight in shared.policy.model.named_parameters()}
    models = [shared.adapted(AdapterSettings(4), seed).model for seed in (1, 2)]
    own = {id(weight) for weight in shared.policy.model.parameters()}
    for model in models:
        others = {name for name, weight in model.named_parameters() if id(weight) not in own}
        assert others
        assert all(".lora_" in name for name in others)
        assert {id(weight) for weight in model.parameters()} >= own
    assert all(torch.equal(weight, before[name]) for name, weight in shared.policy.model.named_parameters())


def test_a_client_finds_its_own_things_only(ann: Any, bob: Any, url: str) -> None:
    client = ann.create_lora_training_client(BASE, rank=4).result()
    path = client.save_state("mine").result().path
    with pytest.raises(ERRORS, match="there is no checkpoint"):
        bob.create_training_client_from_state(path).result()
    with pytest.raises(ERRORS, match="there is no checkpoint"):
        bob.create_sampling_client(model_path=path).result()
    found = httpx.post(f"{url}/api/v1/get_info", json={"model_id": client.model_id}, headers={"x-api-key": BOB})
    assert found.status_code == 404
    found = httpx.post(
        f"{url}/api/v1/retrieve_future", json={"request_id": f"{client.model_id}:1"}, headers={"x-api-key": BOB}
    )
    assert found.status_code == 410


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_samples_follow_their_settings(ann: Any, base: Path) -> None:
    sampler = ann.create_sampling_client(base_model=BASE).result()
    prompt = types.ModelInput.from_ints(TEXT[:4])
    policy = load_policy(ModelConfig(path=base), texts=(), seed=0, device=torch.device("cpu"))

    def sample(n: int = 1, **params: Any) -> list[Any]:
        settings = types.SamplingParams(**{"max_tokens": 6, "seed": 11, **params})
        found: list[Any] = sampler.sample(prompt, n, settings).result().sequences
        return found

    three = sample(3)
    assert len({tuple(each.tokens) for each in three}) == 3
    assert [each.tokens for each in sample(3)] == [each.tokens for each in three]
    assert sample(seed=12)[0].tokens != three[0].tokens
    assert len({each.sequence_id for each in three + sample(2)}) == 5
    stopped = sample(stop=[three[0].tokens[2]])[0]
    assert (stopped.tokens, stopped.stop_reason) == (three[0].tokens[:3], "stop")
    end = min(policy.eos_ids)
    endless = sampler.sample(prompt, 64, types.SamplingParams(max_tokens=30, seed=1, stop=[])).result().sequences
    assert {(len(each.tokens), each.stop_reason) for each in endless} == {(30, "length")}
    ending = sampler.sample(prompt, 64, types.SamplingParams(max_tokens=30, seed=1)).result().sequences
    assert {each.tokens[-1] == end for each in ending if each.stop_reason == "stop"} == {True}
    text = policy.tokenizer.decode(three[0].tokens[:2])
    cut = sample(stop=text)[0]
    assert cut.stop_reason == "stop"
    assert three[0].tokens[: len(cut.tokens)] == cut.tokens
    assert text in policy.tokenizer.decode(cut.tokens)
    for temperature in (0.5, 1.0):
        found = sample(temperature=temperature, top_p=0.9, top_k=5)[0]
        with torch.no_grad():
            logits = policy.model.eval()(torch.tensor([TEXT[:4] + found.tokens])).logits[0, 3:-1].float()
        own = torch.log_softmax(logits / temperature, -1)[torch.arange(6), torch.tensor(found.tokens)]
        assert found.logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert len(sampler.sample(prompt, 1, types.SamplingParams(seed=3)).result().sequences[0].tokens) <= 256 - 4


def test_log_probs_of_prompts_and_of_the_most_probable_tokens(ann: Any, base: Path) -> None:
    sampler = ann.create_sampling_client(base_model=BASE).result()
    found = sampler.sample(
        types.ModelInput.from_ints(TEXT),
        1,
        types.SamplingParams(max_tokens=2, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()
    policy = load_policy(ModelConfig(path=base), texts=(), seed=0, device=torch.device("cpu"))
    sequence = found.sequences[0]
    with torch.no_grad():
        logits = policy.model.eval()(torch.tensor([TEXT + sequence.tokens])).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)
    assert found.prompt_logprobs[0] is None
    own = logprobs[torch.arange(7), torch.tensor(TEXT[1:])]
    assert found.prompt_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert found.topk_prompt_logprobs[0] is None
    for place, row in enumerate(found.topk_prompt_logprobs[1:]):
        values, ids = logprobs[place].topk(3)
        assert [token for token, _ in row] == ids.tolist()
        assert [value for _, value in row] == pytest.approx(values.tolist(), abs=1e-4)
    for place, row in enumerate(sequence.topk_logprobs):
        assert row[0][0] == sequence.tokens[place]
        assert row[0][1] == pytest.approx(float(logprobs[7 + place].max()), abs=1e-4)
    last = sampler.sample(
        types.ModelInput.from_ints(TEXT),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    ).result()
    assert last.prompt_logprobs[:6] == [None] * 6
    assert last.prompt_logprobs[6:] == pytest.approx(own.tolist()[5:], abs=1e-4)


def test_log_probs_of_many_prompts_are_those_of_each(ann: Any) -> None:
    """Passes are shared; prompts of different lengths, with other numbers of most probable tokens."""
    sampler = ann.create_sampling_client(base_model=BASE).result()
    draws = np.random.default_rng(5)
    prompts = [draws.integers(4, 120, size).tolist() for size in (1, 2, 30, 7, 30, 90)]

    def ask(number: int) -> Any:
        return sampler.sample(
            types.ModelInput.from_ints(prompts[number]),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=number,
        )

    alone = [ask(number).result() for number in range(6)]
    for number, together in enumerate([each.result() for each in [ask(number) for number in range(6)]]):
        np.testing.assert_allclose(together.prompt_logprobs_np, alone[number].prompt_logprobs_np, atol=1e-4)
        best = together.topk_prompt_logprobs
        if number == 0:
            assert best is None
            continue
        assert [[len(row) for row in best[1:]], best[0]] == [[number] * (len(prompts[number]) - 1), None]
        for row, own in zip(best[1:], alone[number].topk_prompt_logprobs[1:], strict=True):
            assert [token for token, _ in row] == [token for token, _ in own]


def test_a_snapshot_does_not_change_with_training(ann: Any) -> None:
    client = ann.create_lora_training_client(BASE, rank=4).result()
    before = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TEXT)
    first = before.compute_logprobs(prompt).result()
    train(client, TEXT, 4)
    after = client.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(prompt).result() == first
    assert sum(after.compute_logprobs(prompt).result()[1:]) > sum(first[1:]) + 1


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_refused_with_a_reason(ann: Any) -> None:
    for make, reason in (
        (lambda: ann.create_lora_training_client("no/such"), "there is no base model 'no/such'; this server has: toys"),
        (lambda: ann.create_lora_training_client(BASE, rank=0), "the LoRA rank is 0"),
        (
            lambda: ann.create_lora_training_client(BASE, train_mlp=False, train_attn=False),
            "the output layer alone cannot be adapted",
        ),
        (lambda: ann.create_sampling_client(base_model="no/such"), "there is no base model"),
    ):
        with pytest.raises(ERRORS, match=reason):
            make().result()
    sampler = ann.create_sampling_client(base_model=BASE).result()
    for tokens, options, reason in (
        ([5] * 256, {}, "leaves no room"),
        ([5, 10**6], {}, "outside of the vocabulary"),
        ([], {}, "the prompt has no tokens"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
    ):
        with pytest.raises(ERRORS, match=reason):
            sampler.sample(
                types.ModelInput.from_ints(tokens), 1, types.SamplingParams(**{"max_tokens": 2, **options})
            ).result()


@pytest.mark.parametrize(
    ("data", "loss", "options", "reason"),
    [
        (datum(TEXT), "stable_reinforce", {}, "stable_reinforce.*choose importance_sampling"),
        (datum(TEXT), "importance_sampling", {}, "has no `advantages`"),
        (datum(TEXT, advantages=[1.0] * 7), "ppo", {}, "has no `logprobs`"),
        (datum(TEXT, logprobs=[-1.0] * 7, advantages=[1.0] * 7), "ppo", {"beta": 1.0}, "no option of `ppo`"),
        (datum(TEXT, weights=[1.0] * 6), "cross_entropy", {}, "give as many"),
        (datum(TEXT, weights=[float("nan")] * 7), "cross_entropy", {}, "not finite"),
        (
            types.Datum(
                model_input=types.ModelInput.from_ints([5, 6]),
                loss_fn_inputs={"target_tokens": np.ones((2, 2), np.int64), "advantages": np.ones((2, 2), np.float32)},
            ),
            "ppo",
            {},
            "which only cross_entropy takes",
        ),
        (datum([5] * 300), "cross_entropy", {}, "more than the model's context"),
        (datum([5, 10**6]), "cross_entropy", {}, "outside of the model's vocabulary"),
        (
            types.Datum(
                model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]),
                loss_fn_inputs={"target_tokens": [1]},
            ),
            "cross_entropy",
            {},
            "only text is supported",
        ),
    ],
)
def test_wrong_data_is_refused_and_training_goes_on(
    data: Any, loss: str, options: dict[str, float], reason: str, ann: Any
) -> None:
    client = ann.create_lora_training_client(BASE, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match=reason) as found:
        client.forward_backward([data], loss, options).result()
    assert found.value.category is types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no gradients since the last optimizer step"):
        client.optim_step(ADAM).result()
    assert len(train(client, TEXT, 1)) == 7


def test_a_step_without_any_weight_changes_nothing(ann: Any) -> None:
    client = ann.create_lora_training_client(BASE, rank=4).result()
    first = client.forward_backward([datum(TEXT, weights=[0.0] * 7)], "cross_entropy")
    assert client.optim_step(ADAM).result().metrics["skipped:max"] == 1
    assert first.result().metrics["loss:sum"] == 0
    again = client.forward([datum(TEXT)], "cross_entropy").result()
    assert again.loss_fn_outputs[0]["logprobs"].tolist() == first.result().loss_fn_outputs[0]["logprobs"].tolist()


def test_a_wrong_key_is_refused_and_health_needs_none(url: str) -> None:
    with pytest.raises(tinker.APIStatusError, match="the API key is wrong") as found:
        tinker.ServiceClient(base_url=url, api_key="tml-other").create_lora_training_client(BASE).result()
    assert found.value.status_code == 401
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    assert httpx.get(f"{url}/api/v1/healthz").json() == {"status": "ok"}
    headers = {"x-api-key": ANN}
    names = httpx.get(f"{url}/api/v1/get_server_capabilities", headers=headers).json()["supported_models"]
    assert {each["model_name"]: each["max_context_length"] for each in names} == {BASE: 256, "toys/second": 256}
    assert httpx.post(f"{url}/api/v1/telemetry", json={"any": 1}, headers=headers).json() == {"status": "accepted"}
    counted = httpx.get(f"{url}/metrics", headers=headers).text
    assert 'rollmill_requests_total{key="ann",route="/api/v1/telemetry",status="200"}' in counted
    for path, body, status in (
        ("no_such", {}, 404),
        ("create_model", {"model": 1}, 400),
        ("session_heartbeat", {"session_id": "other"}, 404),
        ("retrieve_future", {"request_id": "other"}, 410),
        ("forward_backward", {}, 400),
    ):
        answer = httpx.post(f"{url}/api/v1/{path}", json=body, headers=headers)
        assert (path, answer.status_code) == (path, status)
        assert answer.json()["error"]["message"]


def test_a_repeated_request_is_done_once(url: str, ann: Any) -> None:
    client = ann.create_lora_training_client(BASE, rank=4).result()
    client.forward_backward([datum(TEXT)], "cross_entropy").result()
    body = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": ANN}) as http:
        answers = [http.post("/optim_step", json=body).json() for _ in range(2)]
        assert answers[0] == answers[1]
        found = [http.post("/retrieve_future", json={"request_id": each["request_id"]}).json() for each in answers]
    assert found[0] == found[1]
    assert found[0]["metrics"]["skipped:max"] == 0


def test_a_session_without_a_heartbeat_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        limits = ServiceLimits(sessions=1, idle_s=60)
        service = TinkerService({}, CheckpointStore(tmp_path), limits, KeyRateLimiter())
        request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
        session = service.create_session(request, "ann")
        session.seen -= 50
        with pytest.raises(ApiError, match="1 sessions are open, at most 1 are held"):
            service.create_session(request, "ann")
        session.seen -= 50
        assert service.create_session(request, "ann").id != session.id
        with pytest.raises(ApiError, match="it may have been idle for too long"):
            service.session(session.id, "ann")
        await service.close()

    asyncio.run(main())


# -- parts -------------------------------------------------------------------------------------------------------------


def test_turns_run_in_the_order_of_their_numbers() -> None:
    done: list[int] = []

    async def work(number: int) -> Result:
        done.append(number)
        if number == 2:
            raise ValueError
        return Result(b"")

    async def main() -> None:
        turns = Turns()
        tasks = [asyncio.ensure_future(turns.take(number, lambda n=number: work(n))) for number in (3, 2, 4, 1)]
        await asyncio.wait(tasks)

    asyncio.run(main())
    assert done == [1, 2, 3, 4]


def test_promises_are_bounded_late_and_forgotten() -> None:
    async def main() -> None:
        store = PromiseStore(most=2, deadline_s=0.5, fetched_s=0.2)

        async def never() -> Result:
            await asyncio.Event().wait()
            return Result(b"")

        async def at_once() -> Result:
            return Result(b"done")

        slow = store.make("slow", "ann", never)
        assert store.make("slow", "ann", at_once) is slow
        assert await store.wait(slow, 0.01) is None
        store.make("other", "ann", never)
        with pytest.raises(ApiError, match="at most 2 are taken"):
            store.make("third", "ann", at_once)
        with pytest.raises(ApiError) as refused:
            store.find("slow", "bob")
        assert refused.value.status == 410
        late = await store.wait(slow, 5)
        assert late is not None
        assert b"had not come after 0.5 s" in late.body
        await asyncio.sleep(0.3)
        assert store.find("slow", "ann") is slow
        assert await store.wait(store.make("next", "ann", at_once), 5) == Result(b"done")
        with pytest.raises(ApiError, match="was forgotten"):
            store.find("slow", "ann")
        assert store.find("other", "ann").fetched is None
        await store.close()
        with pytest.raises(ApiError, match="is ending"):
            store.make("last", "ann", at_once)

    asyncio.run(main())


def test_top_log_probs_of_one_token_prompts_are_empty(ann: Any) -> None:
    sampler = ann.create_sampling_client(base_model=BASE).result()
    found = sampler.sample(
        types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True
    ).result()
    assert np.isnan(found.prompt_logprobs_np).all()
