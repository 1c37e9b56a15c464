"""Completions that repeat themselves end early, and cost what the run file says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import tiny_run
from support.toys import toy_model

import rollmill
from rollmill.config.rollout import RepetitionConfig, SamplingConfig
from rollmill.engines.base import CompletionPrefix, GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.engines.stop_strings import RepetitionDetector
from rollmill.trackers import read_metrics
from rollmill.types import StopReason


def repeats(tokens: list[int], config: RepetitionConfig) -> bool:
    """By definition: the text ends with a stretch that stands there often enough, and whole stretches or a part."""
    for period in range(1, min(config.period, len(tokens)) + 1):
        span = max(config.times * period, config.tokens)
        if len(tokens) >= span and all(tokens[-i] == tokens[-i - period] for i in range(1, span - period + 1)):
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.builds(RepetitionConfig, period=st.integers(1, 8), times=st.integers(2, 4), tokens=st.integers(2, 20)),
)
@settings(max_examples=200, deadline=None)
def test_found_at_the_first_token_where_it_is_so(tokens: list[int], config: RepetitionConfig) -> None:
    watch = RepetitionDetector(config)
    found = [watch.add(token) for token in tokens]
    assert found == [repeats(tokens[:end], config) for end in range(1, len(tokens) + 1)]


@pytest.mark.slow
def test_the_engine_ends_there_and_a_begun_completion_remembers() -> None:
    model = toy_model("qwen3", vocab_size=130)
    engine = NativeEngine(model, context=512)
    greedy = SamplingConfig(temperature=0, max_new_tokens=200)
    config = RepetitionConfig(period=40, times=3, tokens=30)
    watching = greedy.model_copy(update={"repetition": config})
    [free] = asyncio.run(engine.generate(GenerationRequest([7] * 5, greedy)))
    tokens = free.token_ids.tolist()
    end = next(end for end in range(1, 201) if repeats(tokens[:end], config))
    assert end < 200
    [ended] = asyncio.run(engine.generate(GenerationRequest([7] * 5, watching)))
    assert ended.token_ids.tolist() == tokens[:end]
    assert ended.stop_reason is StopReason.REPETITION
    cut = end - 4
    begun = CompletionPrefix(free.token_ids[:cut], free.logprobs[:cut], free.kept_logmass[:cut], free.versions[:cut])
    [again] = asyncio.run(engine.generate(GenerationRequest([7] * 5, watching, prefixes=[begun])))
    assert again.token_ids.tolist() == tokens[:end]


@pytest.mark.parametrize("workflow", ["single_turn", "once"])
def test_a_penalty_is_a_part_of_the_reward(tmp_path: Path, workflow: str) -> None:
    (tmp_path / "flow.py").write_text(
        "import rollmill\n\n@rollmill.workflow\nasync def once(task, policy, judge):\n"
        "    return await judge(await policy.complete(task.prompt))\n"
    )
    rewards = [{"name": "repetition"}]
    repetition = {"period": 2, "times": 2, "tokens": 2, "penalty": 0.25}
    path = tiny_run(tmp_path, plugins=["flow.py"], rewards=rewards, rollout={"repetition": repetition}, evaluation=None)
    overrides = ["stages.0.steps=1", "stages.1.steps=1", f"stages.1.workflow={workflow}"]
    rollmill.run(path, overrides, tmp_path / "run")
    experiences = rollmill.load_experiences(tmp_path / "run", 2)
    ended = [each.stop_reason is StopReason.REPETITION for each in experiences]
    assert 0 < sum(ended) < len(ended)
    for each, repeated in zip(experiences, ended, strict=True):
        assert each.reward_parts["rollout/repetition"] == (-0.25 if repeated else 0.0)
        assert each.reward == sum(each.reward_parts.values())
    last = read_metrics(tmp_path / "run")[-1]
    assert last["length/repeated"] == sum(ended) / len(ended)
    assert last["reward/rollout/repetition"] == pytest.approx(-0.25 * sum(ended) / len(ended))
