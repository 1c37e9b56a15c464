"""The native engine against transformers' own generate and forward passes."""

from __future__ import annotations

import asyncio
import copy
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import toy_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine, decode, decoder, kv_cache
from rollmill.errors import EngineError
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.engine import build_engine
from rollmill.types import Completion, StopReason

ARCHITECTURES = ["qwen2", "qwen3", "llama", "gemma", "gemma2", "qwen3_moe", "mixtral"]
OTHERS = [each for each in ARCHITECTURES if each not in ("qwen3", "gemma2")]
VOCAB = 130


def engine_of(model: torch.nn.Module, **options: object) -> NativeEngine:
    return NativeEngine(model, **({"context": 256, "max_sequences": 11, "prefill_tokens": 16} | options))  # type: ignore[arg-type]


def prompts_of(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(8, VOCAB) for _ in range(length)] for length in lengths]


def serve(
    engine: NativeEngine, requests: list[GenerationRequest], delays: list[int] | None = None
) -> list[list[Completion]]:
    """Serve requests, each after a number of turns of the event loop (late joins)."""

    async def late(request: GenerationRequest, delay: int) -> list[Completion]:
        for _ in range(delay):
            await asyncio.sleep(0)
        return await engine.generate(request)

    async def main() -> list[list[Completion]]:
        waits = delays or [0] * len(requests)
        return list(await asyncio.gather(*(late(r, d) for r, d in zip(requests, waits, strict=True))))

    return asyncio.run(main())


def reference_logprobs(model: torch.nn.Module, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    tokens = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, len(completion.prompt_ids) - 1 : -1]
    new = torch.tensor(completion.token_ids.astype(np.int64))
    return (logits / temperature).log_softmax(-1).gather(1, new[:, None])[:, 0]


@pytest.fixture(params=[False, True], ids=["parts", "whole"])
def whole_buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over whole buckets too, which half precision on a CPU takes, in fp32."""
    monkeypatch.setattr(decode, "_dense", lambda store: request.param)


@pytest.mark.usefixtures("whole_buckets")
@pytest.mark.parametrize(
    "architecture", ["qwen3", "gemma2", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_greedy_equals_generate_for_ragged_batches_late_joins_and_shared_prompts(architecture: str) -> None:
    model = toy_model(architecture, vocab_size=VOCAB)
    prompts = prompts_of((3, 20, 7, 33, 50, 5))
    greedy = SamplingConfig(temperature=0, max_new_tokens=40)
    requests = [GenerationRequest(prompt, greedy, n=3) for prompt in prompts]
    served = serve(engine_of(model, eos_ids=frozenset([7])), requests, [0, 0, 5, 9, 14, 20])
    for prompt, completions in zip(prompts, served, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=40, eos_token_id=7, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert [c.token_ids.tolist() for c in completions] == [expected] * 3


@pytest.mark.usefixtures("whole_buckets")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_forward_pass(architecture: str, temperature: float) -> None:
    model = toy_model(architecture, vocab_size=VOCAB)
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=40)
    served = serve(
        engine_of(model), [GenerationRequest(p, sampling, n=4, seed=i) for i, p in enumerate(prompts_of((4, 19, 40)))]
    )
    for completion in (c for group in served for c in group):
        expected = reference_logprobs(model, completion, temperature)
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, atol=1e-5, rtol=0)
        assert np.all(completion.kept_logmass == 0)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2"])
def test_long_prompts_in_long_chunks_equal_a_forward_pass(architecture: str) -> None:
    model = toy_model(architecture, vocab_size=VOCAB)
    requests = [
        GenerationRequest(p, SamplingConfig(max_new_tokens=3), n=2, seed=i)
        for i, p in enumerate(prompts_of((901, 700)))
    ]
    served = serve(engine_of(model, context=1024, prefill_tokens=300), requests)
    for completion in (c for group in served for c in group):
        expected = reference_logprobs(model, completion)
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_large_capacities_waste_at_most_a_third() -> None:
    capacities = [kv_cache.bucket_capacity_for(length) for length in range(1, 5000)]
    assert sorted(set(capacities))[:9] == [32, 64, 96, 128, 192, 256, 384, 512, 768]
    assert all(length <= capacity <= max(64, 1.5 * length) for length, capacity in enumerate(capacities, 1))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_bf16_logprobs_are_as_close_to_fp32_as_transformers_own(architecture: str) -> None:
    model = toy_model(architecture, vocab_size=VOCAB)
    sampling = SamplingConfig(max_new_tokens=70)
    requests = [GenerationRequest(p, sampling, n=4, seed=i) for i, p in enumerate(prompts_of((4, 19, 40)))]
    served = serve(engine_of(model, dtype=torch.bfloat16), requests)
    completions = [c for group in served for c in group]
    exact = torch.cat([reference_logprobs(model, c) for c in completions])
    half = torch.cat([reference_logprobs(model.bfloat16(), c).float() for c in completions])
    ours = torch.cat([torch.from_numpy(c.logprobs) for c in completions])
    assert (ours - exact).abs().mean() < 1.2 * (half - exact).abs().mean()


def test_truncated_sampling_reports_both_distributions() -> None:
    model = toy_model("qwen3", vocab_size=VOCAB)
    sampling = SamplingConfig(temperature=0.8, top_p=0.6, top_k=20, max_new_tokens=30)
    [[completion]] = serve(engine_of(model), [GenerationRequest([5, 9, 11], sampling, seed=3)])
    expected = reference_logprobs(model, completion, 0.8)
    full = torch.from_numpy(completion.logprobs + completion.kept_logmass)
    torch.testing.assert_close(full, expected, atol=1e-5, rtol=0)
    assert np.all(completion.kept_logmass < 0)


@pytest.mark.slow
def test_a_seed_gives_the_same_completion_alone_and_in_a_full_batch() -> None:
    model = toy_model("llama", vocab_size=VOCAB)
    sampling = SamplingConfig(max_new_tokens=40)
    prompts = prompts_of((12, 3, 8, 30, 17, 5, 9))
    requests = [GenerationRequest(prompt, sampling, n=2, seed=100 + i) for i, prompt in enumerate(prompts)]
    together = serve(engine_of(model), requests, [0, 3, 0, 8, 1, 0, 11])
    for i, group in enumerate(together):
        [alone] = serve(engine_of(model, max_sequences=1, prefill_tokens=2048), [requests[i]])
        assert [c.token_ids.tolist() for c in alone] == [c.token_ids.tolist() for c in group]
    assert together[0][0].token_ids.tolist() != together[0][1].token_ids.tolist()


@pytest.mark.slow
def test_samples_follow_the_exact_distribution() -> None:
    """Chi-square over the joint distribution of two tokens, enumerated; 1e-4 false alarm rate, fixed seed."""
    vocab, n = 16, 20_000
    model = toy_model("qwen3", vocab_size=vocab)
    prompt = [3, 1, 2]
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        tails = torch.tensor([[*prompt, token] for token in range(vocab)])
        second = model(tails).logits[:, -1].double().softmax(-1)
    joint = (first[:, None] * second).flatten().numpy()
    sampling = SamplingConfig(max_new_tokens=2)
    [completions] = serve(engine_of(model, max_sequences=2000), [GenerationRequest(prompt, sampling, n=n, seed=7)])
    counts = np.zeros(vocab * vocab)
    for completion in completions:
        counts[completion.token_ids[0] * vocab + completion.token_ids[1]] += 1
    big = joint * n >= 5
    expected = np.append(joint[big] * n, joint[~big].sum() * n)
    observed = np.append(counts[big], counts[~big].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    degrees = len(expected) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3  # Wilson-Hilferty, p = 1e-4
    assert statistic < limit


def test_every_eos_id_and_stop_id_ends_a_completion() -> None:
    model = toy_model("qwen3", vocab_size=VOCAB)
    free = serve(engine_of(model), [GenerationRequest([5, 6], SamplingConfig(max_new_tokens=60), n=6, seed=1)])[0]
    eos = frozenset(int(c.token_ids[k]) for c, k in zip(free, (5, 9, 2, 20, 11, 30), strict=True))
    stop_id = int(free[0].token_ids[3])
    sampling = SamplingConfig(max_new_tokens=60, stop_token_ids=[stop_id])
    ended = serve(engine_of(model, eos_ids=eos), [GenerationRequest([5, 6], sampling, n=6, seed=1)])[0]
    for before, after in zip(free, ended, strict=True):
        tokens = before.token_ids.tolist()
        cut = next(i for i, token in enumerate(tokens) if token in eos | {stop_id}) + 1
        assert after.token_ids.tolist() == tokens[:cut]
        assert after.stop_reason is StopReason.EOS


def test_length_and_context_limits() -> None:
    model = toy_model("qwen3", vocab_size=VOCAB)
    engine = engine_of(model, context=32)
    [[short], [long]] = serve(
        engine,
        [
            GenerationRequest([1] * 4, SamplingConfig(max_new_tokens=5)),
            GenerationRequest([1] * 30, SamplingConfig(max_new_tokens=50)),
        ],
    )
    assert (len(short.token_ids), short.stop_reason) == (5, StopReason.LENGTH)
    assert (len(long.token_ids), long.stop_reason) == (2, StopReason.LENGTH)
    with pytest.raises(EngineError, match=r"task a/1: the prompt has 32 tokens but the model's context is 32"):
        serve(engine, [GenerationRequest([1] * 32, SamplingConfig(), id="task a/1")])
    with pytest.raises(EngineError, match="no tokens"):
        serve(engine, [GenerationRequest([], SamplingConfig())])


def updated_in_flight(engine: NativeEngine, model: Any, new: Any, **request: Any) -> list[Completion]:
    """Completions whose model gets the weights of `new`, as version 5, after some tokens."""

    async def main() -> list[Completion]:
        sampling = SamplingConfig(max_new_tokens=30)
        work = asyncio.ensure_future(engine.generate(GenerationRequest([4, 8, 15], sampling, **request)))
        for _ in range(12):
            await asyncio.sleep(0)
        engine.pause()
        await engine.drain()
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
                mine.copy_(theirs)
        engine.weights_updated(5)
        engine.resume()
        return await work

    return asyncio.run(main())


def test_weights_updated_in_flight() -> None:
    """Tokens carry the version; after an update, running completions continue exactly as the new weights would."""
    old, new = toy_model("qwen3", vocab_size=VOCAB, seed=0), toy_model("qwen3", vocab_size=VOCAB, seed=1)
    completions = updated_in_flight(engine_of(old, max_sequences=4), old, new, n=6, seed=2)
    assert {int(v) for c in completions for v in c.versions} == {0, 5}
    for completion in completions:
        fresh = completion.versions == 5
        expected = reference_logprobs(new, completion)
        torch.testing.assert_close(
            torch.from_numpy(completion.logprobs[fresh]), expected[torch.from_numpy(fresh)], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_cached_can_be_kept_over_an_update(lost: bool) -> None:
    """Running completions go on from the new weights over the old keys and values, and their log-probs say so; those
    that begin later know the new weights alone. A cache that is gone is computed anew."""
    old, new = toy_model("qwen3", vocab_size=VOCAB, seed=0), toy_model("qwen3", vocab_size=VOCAB, seed=1)
    first = copy.deepcopy(old)
    section = {
        "max_staleness": 1,
        "engine": {"name": "native", "after_update": "keep"},
        "rollout": {"max_sequences": 4},
    }
    policy = PolicyModel(old, None, frozenset(), 0, 256, torch.device("cpu"))
    engine = build_engine(policy, StageConfig.model_validate(section), "fp32")
    assert isinstance(engine, NativeEngine)
    if lost:
        update = engine.weights_updated
        engine.weights_updated = lambda version: (engine.core.destroy_cache(), update(version))[1]  # type: ignore[method-assign]
    completions = updated_in_flight(engine, old, new, n=6, seed=2)
    begun = [int((completion.versions == 0).sum()) for completion in completions]
    assert sorted(begun)[:2] == [0, 0]
    assert sorted(begun)[2] > 1
    for completion, count in zip(completions, begun, strict=True):
        expected = reference_logprobs(new, completion)
        if count and not lost:
            expected = continued_logprobs(first, new, completion, count)
        found = torch.from_numpy(completion.logprobs[count:])
        torch.testing.assert_close(found, expected[count:], atol=1e-5, rtol=0)
    assert engine.core.cached_entries == 0


def continued_logprobs(old: Any, new: Any, completion: Completion, count: int) -> torch.Tensor:
    """Of transformers: `old` has read the prompt and `count` tokens but the last, and `new` reads the rest."""
    ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
    prompt, at = len(completion.prompt_ids), len(completion.prompt_ids) + count - 1
    with torch.no_grad():
        cache = old(ids[:, :at], use_cache=True).past_key_values
        logits = new(ids[:, at:-1], past_key_values=cache).logits[0]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[0, at + 1 :, None])[:, 0]
    return torch.cat([torch.zeros(at + 1 - prompt), logprobs])


def test_pause_keeps_requests_and_cancelling_frees_memory() -> None:
    engine = engine_of(toy_model("qwen3", vocab_size=VOCAB))

    async def main() -> None:
        work = asyncio.ensure_future(
            engine.generate(GenerationRequest([1, 2, 3], SamplingConfig(max_new_tokens=20), n=3))
        )
        for _ in range(4):
            await asyncio.sleep(0)
        engine.pause()
        await engine.drain()
        made = engine.tokens_generated
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.tokens_generated == made < 60
        engine.resume()
        assert sum(len(c.token_ids) for c in await work) == 60

        work = asyncio.ensure_future(
            engine.generate(GenerationRequest([1, 2, 3], SamplingConfig(max_new_tokens=200), n=3))
        )
        for _ in range(6):
            await asyncio.sleep(0)
        assert engine.core.cached_entries > 0
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await engine.drain()
        assert engine.core.cached_entries == 0

    asyncio.run(main())


def test_finished_completions_stream_as_they_end() -> None:
    model = toy_model("qwen3", vocab_size=VOCAB)
    free = serve(engine_of(model), [GenerationRequest([5, 6], SamplingConfig(max_new_tokens=50), n=3, seed=1)])[0]
    eos = frozenset([int(free[1].token_ids[4])])

    async def main() -> list[tuple[int, float]]:
        engine = engine_of(model, eos_ids=eos)
        stream = engine.stream(GenerationRequest([5, 6], SamplingConfig(max_new_tokens=50), n=3, seed=1))
        return [(c.index, c.finished_at) async for c in stream]

    order = asyncio.run(main())
    assert order[0][0] == 1 or order[0][1] < order[-1][1]
    assert [at for _, at in order] == sorted(at for _, at in order)


def test_a_failing_model_fails_the_requests_and_names_them() -> None:
    model = toy_model("qwen3", vocab_size=VOCAB)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match=r"task x: the model's logits are not finite after 0 new tokens"):
        serve(engine_of(model), [GenerationRequest([1, 2], SamplingConfig(), id="task x")])


def test_bf16_decodes_with_one_cast_per_update() -> None:
    model = toy_model("qwen3", vocab_size=VOCAB)
    engine = engine_of(model, dtype=torch.bfloat16)
    request = GenerationRequest([5, 9, 2], SamplingConfig(temperature=0, max_new_tokens=8))
    [[first]] = serve(engine, [request])
    generator = torch.Generator().manual_seed(0)  # of large random weights, some have two best tokens in bf16
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    engine.weights_updated(1)
    [[second]] = serve(engine, [request])
    twin = toy_model("qwen3", vocab_size=VOCAB)
    twin.load_state_dict(model.state_dict())
    [[expected]] = serve(engine_of(twin.bfloat16(), dtype=torch.bfloat16), [request])
    assert second.token_ids.tolist() == expected.token_ids.tolist()
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_cast_of_a_model_with_several_parts() -> None:
    """The layers hold the configuration of their part; those of the cast hold a copy of it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = sizes | {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB}
    vision = sizes | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config.text_config.initializer_range = 0.2  # tokens that differ clearly, for greedy sampling in bf16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config).eval()
    request = GenerationRequest([5, 9, 2], SamplingConfig(temperature=0, max_new_tokens=8))
    [[cast]] = serve(engine_of(model, dtype=torch.bfloat16), [request])
    [[expected]] = serve(engine_of(model.bfloat16(), dtype=torch.bfloat16), [request])
    assert cast.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "qwen3_moe"])
def test_fixed_shapes_give_the_same_completions(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU captures as a graph (fixed shapes, finished rows left in the batch), on the CPU without capture."""
    model = toy_model(architecture, vocab_size=VOCAB)
    sampling = SamplingConfig(max_new_tokens=40)
    requests = [GenerationRequest(p, sampling, n=3, seed=i) for i, p in enumerate(prompts_of((3, 20, 7, 33)))]
    eos = frozenset([11, 12, 13])
    exact = serve(engine_of(model, eos_ids=eos), requests, [0, 0, 6, 12])
    monkeypatch.setattr(decoder, "GraphedStep", StepWithoutCapture)
    engine = engine_of(model, eos_ids=eos)
    engine.core._runner.decoder.captures, engine.core._runner.decoder.slack = True, 0.25
    fixed = serve(engine, requests, [0, 0, 6, 12])
    assert StepWithoutCapture.calls > 0
    for a, b in zip((c for g in exact for c in g), (c for g in fixed for c in g), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert engine.core.cached_entries == 0


class StepWithoutCapture:
    """Runs the step as GraphedStep does, with its warm-up, but eagerly."""

    calls = 0

    def __init__(self, forward: Any, context: Any, beside: Any) -> None:
        assert not context.exact
        self._forward, self._context = forward, context
        forward(context, torch.zeros(1, len(context.positions_B), dtype=torch.int64), context.positions_B[None], 0)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        StepWithoutCapture.calls += 1
        return self._forward(self._context, tokens, self._context.positions_B[None], 0)


def test_cancelling_a_request_disturbs_nobody() -> None:
    """Its entries leave the cache while others wait or decode, and a later prompt takes the place."""
    model = toy_model("qwen3", vocab_size=VOCAB)
    greedy = SamplingConfig(temperature=0, max_new_tokens=30)
    first, queued, later = prompts_of((9, 14, 11))
    [[alone]] = serve(engine_of(model), [GenerationRequest(first, greedy)])

    async def main() -> Completion:
        engine = engine_of(model, max_sequences=2, prefill_tokens=64)
        waiting = asyncio.ensure_future(
            engine.generate(GenerationRequest(queued, SamplingConfig(max_new_tokens=200), n=4))
        )
        await asyncio.sleep(0)
        running = asyncio.ensure_future(engine.generate(GenerationRequest(first, greedy)))
        for _ in range(6):
            await asyncio.sleep(0)
        waiting.cancel()
        for _ in range(8):
            await asyncio.sleep(0)
        after = asyncio.ensure_future(engine.generate(GenerationRequest(later, greedy, n=3)))
        [completion] = await running
        await after
        assert engine.core.cached_entries == 0
        return completion

    assert asyncio.run(main()).token_ids.tolist() == alone.token_ids.tolist()


@pytest.mark.slow
def test_storage_moves_only_under_a_new_context_and_prompts_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step reads storage by address; queued prompts that cannot start yet take no memory."""
    seen: list[tuple[object, list[int]]] = []
    most = 0

    class Watched(StepWithoutCapture):
        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal most
            pieces = [*self._context.own, *self._context.prompts]
            seen.append((self, [piece.bucket.keys[0].data_ptr() for piece in pieces]))
            most = max(most, sum(len(piece.bucket.entries) for piece in self._context.prompts))
            return super().__call__(tokens)

    monkeypatch.setattr(decoder, "GraphedStep", Watched)
    engine = engine_of(toy_model("qwen3", vocab_size=VOCAB), max_sequences=16, prefill_tokens=2048)
    engine.core._runner.decoder.captures, engine.core._runner.decoder.slack = True, 0.25
    requests = [
        GenerationRequest(p, SamplingConfig(max_new_tokens=20), n=8, seed=i)
        for i, p in enumerate(prompts_of((9,) * 32))
    ]
    assert all(len(group) == 8 for group in serve(engine, requests))
    for (step, before), (next_step, after) in pairwise(seen):
        assert step is not next_step or before == after
    assert most <= 4
