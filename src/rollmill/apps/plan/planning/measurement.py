"""Measures steps of a stage: time and memory of each phase, and of each engine step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from rollmill.config.run import StageConfig
from rollmill.engines.native import NativeEngine
from rollmill.models.load import PolicyModel
from rollmill.offload.manager import PhasePeakMemory
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.loop import train_step
from rollmill.orchestrator.stages import Stage
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.types import Experience, ExperienceSource, StopReason, first_per_rollout

MIN_STEPS = 2
_MAX_STEPS, _STEPS_S = 16, 5.0


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of the engine: tokens sampled, tokens attended to, prompt tokens processed."""

    seconds: float
    tokens: int
    attended: int
    prompt: int


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One measured step."""

    groups: int
    seconds: dict[str, float]  #: seconds by phase, with `total`
    memory: dict[str, float]  #: peak in bytes, by phase
    idle: float  #: bytes in use before the step
    cache_bytes: int  #: size of the KV cache after the step
    passes: list[EngineStep]
    lengths: list[list[int]]  #: new tokens of each completion of each group
    cut: int  #: completions truncated by the calibration's limit
    prompts: list[int]  #: prompt tokens of each group
    generated: int  #: new tokens, including those of dropped completions
    trained: int  #: tokens in the trainer's rows; a prompt counts once per group
    acted: int  #: tokens trained on
    largest: int  #: trainer tokens of the largest group
    learned: float  #: share of completions with an advantage
    full_s: float  #: seconds of a training step in which all completions have an advantage


async def measure_steps(
    stage: StageConfig, policy: PolicyModel, tasks: StageTasks, context: RunContext, index: int, groups: int
) -> list[StepMeasurement]:
    """Runs some steps with this many groups, with the stage's own components; the first is not counted."""
    running = Stage(stage, policy, tasks, context, index=index, first_version=0)
    samples: list[StepMeasurement] = []
    try:
        running.begin({})
        began = time.perf_counter()
        await _measure_step(running, groups)
        while len(samples) < MIN_STEPS or (len(samples) < _MAX_STEPS and time.perf_counter() - began < _STEPS_S):
            samples.append(await _measure_step(running, groups))
    finally:
        await running.close()
    return samples


async def _measure_step(stage: Stage, groups: int) -> StepMeasurement:
    peaks, idle = PhasePeakMemory(stage.policy.device), _memory_in_use(stage.policy.device)
    peaks.begin("train")
    with record_engine_steps(stage.engine) as passes:
        result = await train_step(stage)
    memory = {phase: 1e9 * result.metrics.get(f"memory/{phase}", 0.0) for phase in ("rollout", "inference", "train")}
    memory = {phase: peak for phase, peak in memory.items() if peak} or dict(peaks.take())
    engine, found = stage.engine, result.experiences
    cache = engine.core.cache_bytes() if isinstance(engine, NativeEngine) else 0
    rollouts = [each for each in found if each.source is ExperienceSource.ROLLOUT]
    by_group = _by_group(rollouts)
    learned = _share_learned(found)
    tokens = [_trained_tokens(each) for each in _by_group(found).values()]
    return StepMeasurement(
        groups,
        result.seconds,
        memory,
        idle,
        cache,
        passes,
        [[each.action_tokens for each in first_per_rollout(group)] for group in by_group.values()],
        sum(each.stop_reason is StopReason.LENGTH for each in rollouts),
        [_prefix(group[0]) for group in by_group.values()],
        result.generated_tokens,
        sum(tokens),
        sum(each.action_tokens for each in found),
        max(tokens, default=0),
        learned,
        _time_train_step(stage, found),
    )


def _memory_in_use(device: torch.device) -> float:
    """Bytes in use: the process's resident set on a CPU, torch's allocations on a GPU."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    return float(psutil.Process().memory_info().rss)


@contextmanager
def record_engine_steps(engine: Any) -> Iterator[list[EngineStep]]:
    """Context that records each step of a native engine."""
    passes: list[EngineStep] = []
    if not isinstance(engine, NativeEngine):
        yield passes
        return
    core = engine.core
    step = core.step

    def timed() -> None:
        (attended, prompt), tokens, began = core.load(), core.tokens_generated, time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        passes.append(EngineStep(seconds, core.tokens_generated - tokens, attended, prompt - core.load()[1]))

    core.step = timed  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        core.step = step  # type: ignore[method-assign]


def _by_group(experiences: Sequence[Experience]) -> dict[str, list[Experience]]:
    groups: dict[str, list[Experience]] = {}
    for each in experiences:
        groups.setdefault(each.group, []).append(each)
    return groups


def _prefix(experience: Experience) -> int:
    """Number of tokens before the policy's first one."""
    return int(experience.action_mask.argmax())


def _trained_tokens(group: Sequence[Experience]) -> int:
    """Tokens of the trainer's rows for a group; the prompt counts once."""
    prefixes = {each.token_ids[: _prefix(each)].tobytes(): _prefix(each) for each in group}
    return sum(prefixes.values()) + sum(len(each.token_ids) - _prefix(each) for each in group)


def _share_learned(experiences: Sequence[Experience]) -> float:
    rollouts = [each for each in experiences if each.source is ExperienceSource.ROLLOUT]
    silent = sum(each.advantage is not None and not each.advantage.any() for each in rollouts)
    return 1 - silent / max(len(rollouts), 1)


def _time_train_step(stage: Stage, experiences: Sequence[Experience]) -> float:
    """Seconds of a training step on these experiences, with rewards that differ within each group."""
    for number, each in enumerate(experiences):
        each.versions[each.versions >= 0] = stage.version
        if each.reward is not None:
            each.reward = float(number % 2)
            each.reward_parts = dict.fromkeys(each.reward_parts, each.reward)
    began = time.perf_counter()
    stage.learn(experiences)
    stage.finish_step()
    return time.perf_counter() - began
