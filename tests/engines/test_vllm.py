"""vLLM's CPU build as the rollout engine: its tokens and log-probs are those of the trainer's own weights.

Starting vLLM takes long, so that most tests share one process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.toys import toy_checkpoint
from support.vllm_service import RunningEngine, needs_vllm

from rollmill.config.engines import NativeEngineConfig, VLLMEngineConfig
from rollmill.config.model import ModelConfig
from rollmill.config.rollout import RepetitionConfig, SamplingConfig
from rollmill.engines.base import CompletionPrefix, GenerationRequest, SampledToken
from rollmill.engines.native.build import build_native
from rollmill.engines.stop_strings import RepetitionDetector
from rollmill.errors import ConfigError, ContextLengthError, EngineError, EngineLostError
from rollmill.models.load import PolicyModel, load_policy
from rollmill.orchestrator.engine import build_engine
from rollmill.types import Completion, StopReason
from rollmill.weights import InPlacePublisher

pytestmark = [pytest.mark.service, pytest.mark.timeout(900), needs_vllm]

LONG = 1500
"""Tokens that take a while, where nothing ends a completion before."""
PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22]]


class Running(RunningEngine):
    """An engine of a text model."""

    def __init__(self, folder: Path, restarts: int) -> None:
        shape = {"head_dim": 32, "tie_word_embeddings": True, "max_position_embeddings": 4096, "num_hidden_layers": 8}
        config = ModelConfig(path=toy_checkpoint(folder / "model", "qwen3", **shape))
        policy = load_policy(config, texts=(), seed=0, device=torch.device("cpu"))
        super().__init__(policy, {"prefill_tokens": 64, "max_sequences": 16}, restarts=restarts)

    def update(self) -> None:
        """`publish` from outside of the event loop."""

        async def publish() -> None:
            self.publish(noise=0.02)

        self.run(publish())

    def generate(self, prompt: list[int], n: int = 1, seed: int = 0, **sampling: Any) -> list[Completion]:
        options = SamplingConfig(**{"max_new_tokens": 24, **sampling})
        found: list[Completion] = self.run(self.engine.generate(GenerationRequest(prompt, options, n=n, seed=seed)))
        return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("vllm"), restarts=3)
    yield made
    made.close()
    assert not made.engine.weights_path.parent.exists()


def expected(policy: PolicyModel, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of a completion's tokens by the trainer's model."""
    prompt, tokens = completion.prompt_ids, completion.token_ids
    ids = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.long)[None]
    with torch.no_grad():
        logits = policy.model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    found: np.ndarray = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return found


def test_greedy_output_is_the_trainers_after_every_update(running: Running) -> None:
    native = build_native(NativeEngineConfig(), running.policy, running.config.rollout, "fp32")
    for _ in range(4):
        running.update()
        InPlacePublisher(native).publish(running.version)
        for prompt in PROMPTS:
            [ours] = running.generate(prompt, temperature=0)
            [theirs] = running.run(
                native.generate(GenerationRequest(prompt, SamplingConfig(temperature=0, max_new_tokens=24), n=1))
            )
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert (ours.stop_reason, ours.text) == (theirs.stop_reason, theirs.text)
            assert set(ours.versions.tolist()) == {running.version}
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_versions_that_were_not_generated_with_leave_no_trace(running: Running) -> None:
    for _ in range(3):
        running.update()
    [found] = running.generate(PROMPTS[0], temperature=0)
    np.testing.assert_allclose(found.logprobs, expected(running.policy, found), atol=1e-4)
    assert found.versions[0] == running.version


def test_log_probs_are_after_temperature(running: Running) -> None:
    found = running.generate(PROMPTS[0], n=8, seed=3, temperature=0.7)
    gaps = np.concatenate([np.abs(each.logprobs - expected(running.policy, each, 0.7)) for each in found])
    assert gaps.mean() < 1e-4
    assert all((each.kept_logmass == 0).all() for each in found)


TRUNCATIONS = ({"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.3}, {"top_p": 0.8, "top_k": 40, "min_p": 0.02}, {})


def test_truncated_tokens_have_the_log_probs_before_and_the_probability_kept(running: Running) -> None:
    """All at once, so that requests with and without truncation are sampled in the same steps."""
    requests = [
        GenerationRequest(PROMPTS[0], SamplingConfig(temperature=0.8, max_new_tokens=16, **each), n=4, seed=3)
        for each in TRUNCATIONS
    ]

    async def all_at_once() -> list[list[Completion]]:
        return await asyncio.gather(*(running.engine.generate(each) for each in requests))

    for truncation, found in zip(TRUNCATIONS, running.run(all_at_once()), strict=True):
        for each in found:
            np.testing.assert_allclose(
                each.logprobs + each.kept_logmass, expected(running.policy, each, 0.8), atol=1e-4
            )
            kept, inside = kept_by_definition(running.policy, each, 0.8, **truncation)
            np.testing.assert_allclose(each.kept_logmass, kept, atol=1e-4)
            assert inside.all()
    assert all((each.kept_logmass == 0).all() for each in found)


def kept_by_definition(
    policy: PolicyModel,
    completion: Completion,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Log of the mass of the tokens that vLLM's order (min_p, top_k, top_p) keeps; and whether each token is one."""
    prompt, tokens = completion.prompt_ids, completion.token_ids
    ids = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.long)[None]
    with torch.no_grad():
        whole = (policy.model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature).softmax(-1)
    left = torch.where(whole < min_p * whole.amax(-1, keepdim=True), 0.0, whole)
    if top_k:
        left = torch.where(left < left.topk(top_k, -1).values[:, -1:], 0.0, left)
    left = left / left.sum(-1, keepdim=True)
    ordered, index = left.sort(descending=True)
    left = left.scatter(1, index, torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0))
    kept = torch.where(left > 0, whole, 0.0)
    return kept.sum(-1).log().numpy(), (kept.gather(1, ids[0, len(prompt) :, None])[:, 0] > 0).numpy()


def test_truncated_completions_go_on_from_a_prefix(running: Running) -> None:
    [whole] = running.generate(PROMPTS[0], top_p=0.7, seed=5)
    part = CompletionPrefix(whole.token_ids[:6], whole.logprobs[:6], whole.kept_logmass[:6], whole.versions[:6])
    options = SamplingConfig(max_new_tokens=24, top_p=0.7)
    [found] = running.run(
        running.engine.generate(GenerationRequest(PROMPTS[0], options, n=1, seed=5, prefixes=(part,)))
    )
    np.testing.assert_array_equal(found.kept_logmass[:6], whole.kept_logmass[:6])
    np.testing.assert_allclose(found.logprobs + found.kept_logmass, expected(running.policy, found), atol=1e-4)


def test_a_completion_is_a_function_of_its_seed(running: Running) -> None:
    once, again = (running.generate(PROMPTS[1], n=4, seed=11) for _ in range(2))
    other = running.generate(PROMPTS[1], n=4, seed=12)
    texts = [[tuple(each.token_ids.tolist()) for each in found] for found in (once, again, other)]
    assert texts[0] == texts[1]
    assert not set(texts[0]) & set(texts[2])
    assert len(set(texts[0])) == 4
    assert [each.index for each in once] == [0, 1, 2, 3]


def test_completions_end_at_stop_strings_and_at_all_end_ids(running: Running) -> None:
    plain = running.generate(PROMPTS[0], n=8, seed=5)
    letter = next(c for each in plain for c in each.text[2:] if c.isascii() and c.isalnum())
    for before, after in zip(plain, running.generate(PROMPTS[0], n=8, seed=5, stop=[letter]), strict=True):
        count = len(after.token_ids)
        assert after.token_ids.tolist() == before.token_ids[:count].tolist()
        assert len(after.versions) == len(after.logprobs) == count
        if letter in before.text:
            assert after.stop_reason is StopReason.STOP
            assert letter not in after.text
            assert letter in running.policy.tokenizer.decode(after.token_ids.tolist())
    end = int(plain[0].token_ids[3])
    ended = running.generate(PROMPTS[0], n=8, seed=5, stop_token_ids=[end])[0]
    assert ended.stop_reason is StopReason.EOS
    assert ended.token_ids.tolist() == plain[0].token_ids[: plain[0].token_ids.tolist().index(end) + 1].tolist()


def test_tokens_are_told_with_the_most_probable_ones(running: Running) -> None:
    told: list[SampledToken] = []
    request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=6), n=2, seed=9, on_token=told.append, top=3)
    found = running.run(running.engine.generate(request))
    for each in found:
        own = [token for token in told if token.index == each.index]
        assert [token.token for token in own] == each.token_ids.tolist()
        np.testing.assert_allclose([token.logprob for token in own], each.logprobs)
        for token in own:
            values = [value for _, value in token.top]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)


def test_weights_change_in_the_middle_of_a_completion(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token's log-prob is that of the weights it carries the version of; what was cached is computed anew."""
    monkeypatch.setattr(running.engine, "_eos_ids", frozenset())
    seen = []
    for _ in range(10):  # on a busy machine all tokens may be there before the new weights are
        first = running.version
        seen += [np.bincount(found.versions - first).tolist() for found in _generated_over_an_update(running)]
        if any(len(counts) == 2 and all(counts) for counts in seen):
            return
    pytest.fail(f"no completion has tokens of two versions: old and new tokens {seen}")


def _generated_over_an_update(running: Running) -> list[Completion]:
    """Completions during which weights were published; their log-probs have been compared."""
    before = [parameter.detach().clone() for parameter in running.policy.model.parameters()]
    told: list[int] = []

    def publish_once(token: SampledToken) -> None:
        told.append(token.token)
        if len(told) == 2:
            running.publish(noise=0.02)

    first = running.version
    request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=LONG), n=2, seed=2, on_token=publish_once)
    completions: list[Completion] = running.run(running.engine.generate(request))
    after = [parameter.detach().clone() for parameter in running.policy.model.parameters()]
    for found in completions:
        assert found.versions.tolist() == sorted(found.versions.tolist())
        assert {*found.versions.tolist()} <= {first, first + 1}
        for version, weights in ((first, before), (first + 1, after)):
            own = found.versions == version
            _set(running.policy, weights)
            np.testing.assert_allclose(found.logprobs[own], expected(running.policy, found)[own], atol=1e-4)
    return completions


def _set(policy: PolicyModel, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(policy.model.parameters(), values, strict=True):
            parameter.copy_(value)


def test_paused_requests_are_kept_and_interrupted_ones_handed_out(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.engine, "_eos_ids", frozenset())
    whole = _acted_on(running, running.engine.pause, StopReason.LENGTH)
    parts = _acted_on(running, running.engine.interrupt, StopReason.ABORTED)
    for one, other in zip(parts, whole, strict=True):
        count = len(one.token_ids)
        assert one.token_ids.tolist() == other.token_ids[:count].tolist()
        assert len(one.versions) == len(one.logprobs) == count < LONG


def _acted_on(running: Running, act: Callable[[], None], reason: StopReason) -> list[Completion]:
    """Completions that were paused, or interrupted, while tokens came, and stopped coming before all were there."""

    async def scenario() -> tuple[int, list[Completion]]:
        told: list[SampledToken] = []

        def tell(token: SampledToken) -> None:
            told.append(token)
            if len(told) == 5:
                act()

        request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=LONG), n=2, seed=2, on_token=tell)
        work = asyncio.ensure_future(running.engine.generate(request))
        while len(told) < 5:
            await asyncio.sleep(0.001)
        await running.engine.drain()
        before = 0
        while before < len(told):  # what was sampled before may still be on its way
            before = len(told)
            await asyncio.sleep(0.3)
        running.engine.resume()
        return before, await work

    for _ in range(5):  # on a busy machine all tokens may be there before this process has read the first ones
        came, found = running.run(scenario())
        if came < 2 * LONG:
            assert [each.stop_reason for each in found] == [reason] * 2
            return list(found)
    pytest.fail(f"all tokens came, whatever was done after the fifth ({act.__name__})")


def test_interrupted_completions_continue_with_the_newest_weights(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sampled before is kept to the bit; what comes is by the weights whose version it carries."""
    monkeypatch.setattr(running.engine, "_eos_ids", frozenset())
    parts = _acted_on(running, running.engine.interrupt, StopReason.ABORTED)
    before = [parameter.detach().clone() for parameter in running.policy.model.parameters()]
    first = running.version
    running.update()
    longest = max(len(each.token_ids) for each in parts) + 12
    prefixes = [CompletionPrefix(each.token_ids, each.logprobs, each.kept_logmass, each.versions) for each in parts]
    request = GenerationRequest(PROMPTS[0], SamplingConfig(max_new_tokens=longest), n=2, seed=2, prefixes=prefixes)
    whole: list[Completion] = running.run(running.engine.generate(request))
    for part, found in zip(parts, whole, strict=True):
        cut = len(part.token_ids)
        assert found.token_ids[:cut].tolist() == part.token_ids.tolist()
        assert found.logprobs[:cut].tolist() == part.logprobs.tolist()
        assert found.versions.tolist() == [first] * cut + [running.version] * (longest - cut)
        assert (found.stop_reason, len(found.token_ids)) == (StopReason.LENGTH, longest)
        newer = expected(running.policy, found)
        np.testing.assert_allclose(found.logprobs[cut:], newer[cut:], atol=1e-4)
    after = [parameter.detach().clone() for parameter in running.policy.model.parameters()]
    _set(running.policy, before)
    for found, part in zip(whole, parts, strict=True):
        cut = len(part.token_ids)
        np.testing.assert_allclose(found.logprobs[:cut], expected(running.policy, found)[:cut], atol=1e-4)
    _set(running.policy, after)
    again: list[Completion] = running.run(running.engine.generate(request))
    assert [each.token_ids.tolist() for each in again] == [each.token_ids.tolist() for each in whole]
    done = [CompletionPrefix(each.token_ids, each.logprobs, each.kept_logmass, each.versions) for each in whole]
    tokens = running.engine.tokens_generated
    same: list[Completion] = running.run(running.engine.generate(replace(request, prefixes=done)))
    assert [each.token_ids.tolist() for each in same] == [each.token_ids.tolist() for each in whole]
    assert [each.stop_reason for each in same] == [StopReason.LENGTH] * 2
    assert running.engine.tokens_generated == tokens


def test_completions_end_where_they_repeat_themselves(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.engine, "_eos_ids", frozenset())
    config = RepetitionConfig(period=40, times=3, tokens=30)
    [free] = running.generate(PROMPTS[0], temperature=0, max_new_tokens=400)
    watch = RepetitionDetector(config)
    end = next(at for at, token in enumerate(free.token_ids.tolist(), 1) if watch.add(token))
    assert end < 400
    [ended] = running.generate(PROMPTS[0], temperature=0, max_new_tokens=400, repetition=config)
    assert ended.token_ids.tolist() == free.token_ids[:end].tolist()
    assert ended.stop_reason is StopReason.REPETITION
    assert len(ended.logprobs) == len(ended.versions) == end


def test_it_sleeps_until_new_weights_or_requests_come(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages between the processes: the CPU build has no memory to hand back."""
    [before] = running.generate(PROMPTS[0], temperature=0)
    running.run(running.engine.sleep())
    assert "sleeps" not in running.engine.counters()  # it was not started so that it can
    monkeypatch.setattr(running.engine, "sleeps", True)
    running.run(running.engine.sleep())
    [after] = running.generate(PROMPTS[0], temperature=0)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    running.run(running.engine.sleep())
    running.update()
    [new] = running.generate(PROMPTS[0], temperature=0)
    assert set(new.versions.tolist()) == {running.version}
    np.testing.assert_allclose(new.logprobs, expected(running.policy, new), atol=1e-4)
    assert running.engine.counters()["sleeps"] == 2


def test_it_is_destroyed_and_made_again_with_the_newest_weights(running: Running) -> None:
    running.generate(PROMPTS[0], temperature=0)
    processes = psutil.Process(running.engine.pid).children(recursive=True)
    assert processes
    running.run(running.engine.sleep(destroy=True))
    assert running.engine.pid is None
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)
    running.run(running.engine.sleep(destroy=True))
    running.update()
    [new] = running.generate(PROMPTS[0], temperature=0)
    assert set(new.versions.tolist()) == {running.version}
    np.testing.assert_allclose(new.logprobs, expected(running.policy, new), atol=1e-4)
    assert running.engine.counters()["destroyed"] == 1


def test_no_sleep_on_a_cpu(running: Running) -> None:
    assert isinstance(running.config.engine, VLLMEngineConfig)
    section = running.config.engine.model_copy(update={"sleep": True})
    with pytest.raises(ConfigError, match=r"engine\.sleep: vLLM sleeps on GPUs only, and this run is on a CPU"):
        build_engine(running.policy, running.config.with_engine(section), "fp32")


def test_prompts_longer_than_what_is_taken_at_once(running: Running) -> None:
    """vLLM would take them in parts, which its CPU build does not survive."""
    long = [[(7 * place + other) % 90 + 5 for place in range(3000)] for other in range(3)]

    async def together() -> list[list[Completion]]:
        sampling = SamplingConfig(max_new_tokens=4)
        return await asyncio.gather(
            *(running.engine.generate(GenerationRequest(each, sampling, seed=3)) for each in long)
        )

    for [found] in running.run(together()):
        np.testing.assert_allclose(found.logprobs, expected(running.policy, found), atol=1e-4)


def test_a_cancelled_request_leaves_the_engine_as_it_was(running: Running) -> None:
    async def cancelled() -> None:
        work = asyncio.ensure_future(running.engine.generate(GenerationRequest(PROMPTS[0], SamplingConfig(), n=4)))
        await asyncio.sleep(0.05)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    running.run(cancelled())
    assert len(running.generate(PROMPTS[1], n=2)) == 2


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "text"),
    [
        ([], {}, EngineError, "no tokens"),
        ([1] * 5000, {}, ContextLengthError, "leaves no room"),
    ],
)
def test_requests_that_cannot_be_served(
    running: Running, prompt: list[int], sampling: dict[str, Any], error: type[EngineError], text: str
) -> None:
    with pytest.raises(error, match=text):
        running.generate(prompt, **sampling)


def _core(running: Running) -> psutil.Process:
    """The process that computes."""
    children = psutil.Process(running.engine.pid).children(recursive=True)
    [core] = [each for each in children if each.cmdline()[0].startswith("VLLM::EngineCore")]
    return core


def _stop_core(running: Running) -> psutil.Process:
    """Stop the process that computes, so that what it is asked now is under way when it is killed."""
    core = _core(running)
    core.suspend()
    return core


@pytest.mark.thorough
def test_a_subprocess_that_is_killed_with_requests_under_way_costs_a_restart(running: Running) -> None:
    async def killed() -> list[Completion]:
        core = _stop_core(running)
        work = asyncio.ensure_future(
            running.engine.generate(GenerationRequest(PROMPTS[0], SamplingConfig(), n=4, seed=1))
        )
        await asyncio.sleep(0.1)
        core.kill()
        return await work

    undisturbed = running.generate(PROMPTS[0], n=4, seed=1, max_new_tokens=256)
    restarts = running.engine.counters().get("restarts", 0)
    found = running.run(killed())
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in undisturbed]
    assert running.engine.counters()["restarts"] == restarts + 1


@pytest.mark.thorough
def test_a_subprocess_that_is_killed_while_it_loads_weights_costs_a_restart(running: Running) -> None:
    """vLLM never answers the call that loads them, so the run would be silent for engine.deadline_s."""

    async def killed() -> None:
        core = _stop_core(running)
        running.publish(noise=0.02)
        await asyncio.sleep(0.1)
        core.kill()
        await running.engine.drain()

    restarts = running.engine.counters().get("restarts", 0)
    running.run(killed())
    [found] = running.generate(PROMPTS[0], temperature=0)
    assert set(found.versions.tolist()) == {running.version}
    np.testing.assert_allclose(found.logprobs, expected(running.policy, found), atol=1e-4)
    assert running.engine.counters()["restarts"] == restarts + 1


def test_a_process_that_dies_is_started_again_and_at_last_is_an_error(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this process."""

    async def killed() -> list[Completion]:
        pid = running.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that it does not finish before
        work = asyncio.ensure_future(
            running.engine.generate(GenerationRequest(PROMPTS[0], SamplingConfig(), n=4, seed=1))
        )
        await asyncio.sleep(0.05)
        core = _core(running)
        of_engine = [core, *core.children(recursive=True)]
        os.kill(pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(of_engine, timeout=30)  # in which this process, as if killed too, does nothing
        assert not alive, "vLLM's engine outlives its process"
        return await work

    undisturbed = running.generate(PROMPTS[0], n=4, seed=1, max_new_tokens=256)
    restarts = running.engine.counters().get("restarts", 0)
    found = running.run(killed())
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in undisturbed]
    assert running.engine.counters()["restarts"] == restarts + 1
    monkeypatch.setattr(running.engine, "_restarts_left", 0)
    with pytest.raises(EngineLostError, match=r"lost \d times in this stage .* has ended \(by signal 9\). The end of"):
        running.run(killed())
    with pytest.raises(EngineError, match="has failed and takes no more requests"):
        running.generate(PROMPTS[0])
