"""Kernels, waits of the host and captures on the simulated device stay within budgets, which may only fall."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_gaps import scored_batch
from support.simulated_cuda.trace import Trace, kernels_of
from support.toys import toy_model

from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import GRPO, PPO
from rollmill.config.rollout import SamplingConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine, decoder, model_runner
from rollmill.models import fused_layers
from rollmill.models.transfers import to_device, to_host
from rollmill.trainer import Trainer
from rollmill.trainer.batch import build_token_table

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("simulated")]

KERNELS_A_LAYER, KERNELS_BESIDE = 21, 5  # up to five of them are attention
TRANSFERS_OF_A_STEP = {False: 2, True: 3}  # with top-p the host looks whether the 512 likeliest tokens hold enough
CAPTURES = 0.01  # of decode steps, where rows come and go
TRANSFERS_OF_TRAINING = {"grpo": (35, 3), "ppo": (60, 7)}  # a step, and each micro-batch after the first
SIZES: dict[str, Any] = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 2048}


@dataclass
class Counted:
    """What an engine did."""

    steps: int = 0
    captures: int = 0
    kernels: list[int] = field(default_factory=list)  #: of each captured step


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    capture, decode = decoder.GraphedStep.__init__, model_runner.ModelRunner.decode

    def counting_capture(self: Any, *args: Any) -> None:
        capture(self, *args)
        found.captures += 1
        found.kernels.append(sum(kernels_of(func) for func, *_ in self._graph.ops))

    def counting_decode(self: Any, rows: Any) -> Any:
        found.steps += 1
        return decode(self, rows)

    monkeypatch.setattr(decoder.GraphedStep, "__init__", counting_capture)
    monkeypatch.setattr(model_runner.ModelRunner, "decode", counting_decode)
    return found


def engine(layers: int = 2, vocab_size: int = 130, dtype: torch.dtype = torch.bfloat16, **options: Any) -> NativeEngine:
    model = toy_model("qwen3", vocab_size, num_hidden_layers=layers, **SIZES).cuda()
    made = NativeEngine(model, context=2048, prefill_tokens=4096, dtype=dtype, **options)
    made.weights_updated(0)
    return made


def generate(running: NativeEngine, requests: list[GenerationRequest]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(running.generate, requests))

    return asyncio.run(all_of_them())


def cohort(groups: int = 8, length: int = 40, **sampling: Any) -> list[GenerationRequest]:
    """Prompts of equal length whose completions end together."""
    rng = random.Random(0)
    chosen = SamplingConfig(**({"max_new_tokens": 30} | sampling))
    prompts = [[rng.randrange(8, 130) for _ in range(length)] for _ in range(groups)]
    return [GenerationRequest(prompt, chosen, n=8, seed=seed) for seed, prompt in enumerate(prompts)]


@pytest.mark.parametrize("copied", [True, False], ids=["small weights", "large weights"])
def test_kernels_of_a_captured_decode_step(counted: Counted, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with one input are one product, by a copy of small weights, or as their casts lie side by side."""
    monkeypatch.setattr(fused_layers, "COPIED_BYTES", 1 << 26 if copied else 0)
    generate(engine(layers=2), cohort())
    two = counted.kernels[-1]
    generate(engine(layers=4), cohort())
    a_layer = (counted.kernels[-1] - two) / 2
    assert a_layer <= KERNELS_A_LAYER
    assert two - 2 * a_layer <= KERNELS_BESIDE


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "top_k": 20}], ids=["plain", "truncated"])
def test_transfers_of_a_decode_step(counted: Counted, sampling: dict[str, Any]) -> None:
    found = []
    for tokens in (20, 30):  # within one bucket of the cache, so that the rest of both is equal
        with Trace() as trace:
            generate(engine(vocab_size=1000), cohort(max_new_tokens=tokens, **sampling))
        found.append(trace.transfers())
    assert (found[1] - found[0]) / 10 <= TRANSFERS_OF_A_STEP[bool(sampling)], trace.report(counted.steps)


@pytest.mark.parametrize(
    ("dtype", "captures"),
    [
        pytest.param(torch.bfloat16, 1, id="pages"),
        pytest.param(torch.float32, 4, id="buckets"),  # of 32, 64, 96 and 128 tokens
    ],
)
def test_uniform_completions_are_decoded_by_replays(counted: Counted, dtype: torch.dtype, captures: int) -> None:
    running = engine(layers=1, dtype=dtype)
    generate(running, cohort(max_new_tokens=128))
    counts = running.counters()
    assert counted.captures == counts["decode_captures"] == captures
    assert counted.steps == counts["decode_steps"] == 127
    assert counts["decode_replays"] == 127 - captures * decoder.CAPTURE_AFTER


def test_a_long_tail_is_decoded_by_replays(counted: Counted) -> None:
    """64 completions, of which half have ended after a tenth of the steps, and then new ones with new weights."""
    running = engine(layers=1)
    rng = random.Random(0)
    for version in range(2):
        lengths = [min(int(rng.expovariate(1 / 60)) + 2, 600) for _ in range(63)] + [600]
        prompts = [[rng.randrange(8, 130) for _ in range(rng.randrange(20, 300))] for _ in lengths]
        asked = [SamplingConfig(max_new_tokens=length) for length in lengths]
        generate(running, [GenerationRequest(*each, seed=i) for i, each in enumerate(zip(prompts, asked, strict=True))])
        running.weights_updated(version + 1)
    counts = running.counters()
    assert counted.steps > 1000
    assert counts["decode_captures"] / counted.steps <= CAPTURES
    assert counts["decode_replays"] / counted.steps >= 0.95


@pytest.mark.parametrize(
    ("dtype", "replayed"), [pytest.param(torch.bfloat16, 0.9, id="pages"), pytest.param(torch.float32, 0, id="buckets")]
)
def test_conversations_are_decoded_with_few_captures(counted: Counted, dtype: torch.dtype, replayed: float) -> None:
    """Rows come and go all the time. With buckets a capture would take longer than the steps that it saves."""
    running = engine(layers=1, max_sequences=256, dtype=dtype)

    async def converse(number: int) -> None:
        rng = random.Random(number)
        ids = [rng.randrange(8, 130) for _ in range(rng.randrange(20, 60))]
        for turn in range(5):
            sampling = SamplingConfig(max_new_tokens=rng.randrange(10, 60))
            request = GenerationRequest(ids, sampling, seed=number, continues=turn < 4)
            [completion] = await running.generate(request)
            ids = [*ids, *completion.token_ids.tolist(), *[rng.randrange(8, 130) for _ in range(12)]]
            for _ in range(rng.randrange(20)):  # a tool
                await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*map(converse, range(32)))

    asyncio.run(all_of_them())
    assert counted.steps > 200
    assert counted.captures / counted.steps <= CAPTURES
    assert running.counters()["decode_replays"] / counted.steps >= replayed


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_transfers_of_a_training_step(name: str) -> None:
    options: Any = GRPO() if name == "grpo" else PPO(critic={"lr": 1e-3})
    counts, passes = [], []
    for tokens in (100_000, 300):
        model = toy_model("qwen3", num_hidden_layers=2, **SIZES).cuda()
        experiences = scored_batch(model)
        config = TrainerConfig(lr=1e-3, precision="bf16", micro_batch_tokens=tokens)
        trainer = Trainer(model, build_recipe(options, max_new_tokens=20), config, total_steps=10, device="cuda")
        table = build_token_table(experiences, torch.device("cuda"))
        passes.append(len(trainer._passes.rows(experiences, table, range(len(experiences)))))
        with Trace() as trace:
            trainer.step(experiences, 0)
        counts.append(trace.transfers())
    step, more = TRANSFERS_OF_TRAINING[name]
    assert counts[0] <= step, trace.report()
    assert (counts[1] - counts[0]) / (passes[1] - passes[0]) <= more, trace.report()


def test_several_arrays_are_one_transfer() -> None:
    arrays = [np.arange(6).reshape(2, 3), np.zeros((0, 3), np.float32), np.array([True, False]), np.array([0.5])]
    with Trace() as trace:
        there = to_device(arrays, torch.device("cuda"))
        to_host([there[0].T, *there[1:]])
    assert sorted(kind for kind, _ in trace.crossings.elements()) == ["d2h", "h2d pinned"]
