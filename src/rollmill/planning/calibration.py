"""Short measurements of a stage: a few steps of its own components, with fewer groups than the run file asks for."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from rollmill.config.algorithm import DemonstrationOptions, PolicyGradientOptions
from rollmill.config.loader import LoadedRun
from rollmill.config.placement import OnRay, PlacementConfig
from rollmill.config.residency import ResidencyConfig
from rollmill.config.residency_checks import unhonoured_by_residency
from rollmill.config.run import StageConfig
from rollmill.config.workflows import Traffic
from rollmill.core.errors import ConfigError
from rollmill.core.types import Experience, Source, StopReason, one_per_rollout
from rollmill.engines.native import NativeEngine
from rollmill.master.context import RunContext
from rollmill.master.explorer_actor import trained
from rollmill.master.residents import plan_of
from rollmill.master.selection import StageTasks
from rollmill.master.setup import prepare
from rollmill.master.stage import StageRun
from rollmill.models.load import Policy
from rollmill.monitor.memory import give_back
from rollmill.residency.peaks import Peaks
from rollmill.residency.sizes import sizes_of
from rollmill.sync import SharedReceiver, SharedSender, shared_folder

_SHARES = 8, 4, 2  # of the batch, as divisors
_MIN_STEPS, _MAX_STEPS, _STEPS_S = 2, 16, 5.0
_ENOUGH_S = 30.0
"""More groups are measured only if that takes no longer, once two numbers of them were."""
_ROOM = ResidencyConfig(budget_gb=1e6)  # nothing moves, and peaks are measured by phase
_ENDLESS = 10**6


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of the engine: tokens it gave, tokens it attended to, prompt tokens it read."""

    seconds: float
    tokens: int
    attended: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step."""

    groups: int
    seconds: dict[str, float]  #: by phase, and `total`
    memory: dict[str, float]  #: peak in bytes, by phase
    idle: float  #: bytes taken before the step
    cache_bytes: int  #: afterwards
    passes: list[Pass]
    lengths: list[list[int]]  #: new tokens of each completion of each group
    cut: int  #: completions that ended because the calibration ends them
    prompts: list[int]  #: prompt tokens of each group
    generated: int  #: new tokens, dropped ones included
    trained: int  #: tokens in the trainer's rows, where a prompt counts once for its group
    acted: int  #: tokens that are learned from
    largest: int  #: tokens of the largest group
    learned: float  #: share of completions with an advantage
    full_s: float  #: of a training step in which all have one


@dataclass(frozen=True)
class Calibration:
    """What was measured of a stage, and what is known of its components."""

    stage: StageConfig
    samples: list[Sample]
    sizes: dict[str, int]  #: bytes of components, see residency/sizes.py
    present: dict[str, int]  #: of these, what was on the device while memory was measured, by phase
    longest: int  #: new tokens of a completion at most, while measuring
    publish_s: float  #: sending new weights through shared memory
    take_s: float  #: receiving them
    device: torch.device
    precision: str
    threads: int
    seconds: float = field(default=0.0)  #: what the measurements took

    @property
    def rolls_out(self) -> bool:
        """Whether the stage has rollouts."""
        return self.stage.algorithm.uses_rollouts


def calibrate(loaded: LoadedRun, folder: Path, *, max_tokens: int) -> list[Calibration]:
    """Measure every stage of a run, each with the model as the run file gives it.

    Args:
        folder: for what the components write.
        max_tokens: completions are ended at so many new tokens.

    Raises:
        ConfigError: a stage cannot be measured in one process.
        RollmillError: its components raise; the message says what to do.
    """
    for stage in loaded.stages:
        _refuse(stage)
    _refuse_kinds(loaded.config.placement)
    policy, tasks, context = prepare(loaded, folder)
    return [
        asyncio.run(_calibrated(stage, policy, tasks[index], context, index, max_tokens))
        for index, stage in enumerate(loaded.stages)
    ]


def _refuse(stage: StageConfig) -> None:
    if isinstance(stage.workflow, Traffic):
        raise ConfigError(
            f"stage {stage.name}: workflow `traffic` rolls out nothing by itself, so nothing can be measured; "
            "plan a run with another workflow"
        )
    if stage.algorithm.uses_rollouts and stage.engine.name != "native":
        raise ConfigError(
            f"stage {stage.name}: `plan` measures the native engine; add --set engine=native, and take the other "
            "engine's tokens per second from `python -m bench rollout`"
        )


def _refuse_kinds(placement: PlacementConfig) -> None:
    for number, kind in enumerate(placement.explorers if isinstance(placement, OnRay) else []):
        if kind.engine is not None and kind.engine.name != "native":
            raise ConfigError(
                f"placement.explorers.{number}.engine: `plan` measures the native engine, and explorers that are "
                "alike; add --set placement.explorers=1"
            )


async def _calibrated(
    stage: StageConfig, policy: Policy, tasks: StageTasks, context: RunContext, index: int, max_tokens: int
) -> Calibration:
    began = time.perf_counter()
    longest = min(stage.rollout.max_new_tokens, max_tokens)
    batch = batch_of(stage)
    samples: list[Sample] = []
    measured = stage
    for groups in sorted({max(1, batch // share) for share in _SHARES}):
        if len({sample.groups for sample in samples}) > 1 and _expected_s(samples[-1], groups) > _ENOUGH_S:
            break
        measured = _smaller(stage, groups, longest)
        samples += await _steps(measured, policy, tasks, context, index, groups)
        gc.collect()  # what these steps have left would pass for memory of the next ones
        give_back()
    publish_s, take_s = transfer(policy, context.precision)
    sizes = sizes_of(measured, policy, context.precision)
    return Calibration(
        stage,
        samples,
        sizes,
        _present(measured, policy, sizes, context),
        longest,
        publish_s,
        take_s,
        policy.device,
        context.precision,
        context.threads,
        time.perf_counter() - began,
    )


def _expected_s(last: Sample, groups: int) -> float:
    """Seconds of the fewest steps with so many groups, each with a training step for `full_s`."""
    return (1 + _MIN_STEPS) * (last.seconds["total"] + last.full_s) * groups / last.groups


def batch_of(stage: StageConfig) -> int:
    """Groups of a training step: tasks, demonstrations or pairs."""
    algorithm = stage.algorithm
    return algorithm.batch if isinstance(algorithm, DemonstrationOptions) else stage.rollout.batch


def _smaller(stage: StageConfig, groups: int, longest: int) -> StageConfig:
    """The stage with fewer groups, in one process, without a change of the weights, evaluations and staleness."""
    algorithm = stage.algorithm
    if isinstance(algorithm, DemonstrationOptions):
        algorithm = algorithm.model_copy(update={"batch": groups})
    if isinstance(algorithm, PolicyGradientOptions):
        critic = algorithm.critic.model_copy(update={"warmup_steps": 0})
        algorithm = algorithm.model_copy(update={"critic": critic})
    rollout = {"batch": groups, "max_new_tokens": longest, "token_budget": None}
    changes: dict[str, Any] = {
        "steps": _ENDLESS,
        "max_staleness": 0,
        "algorithm": algorithm,
        "rollout": stage.rollout.model_copy(update=rollout),
        "trainer": stage.trainer.model_copy(update={"lr": 0.0, "ranks": 1, "sharding": "none"}),
        "evaluation": None,
        "early_stop": None,
        "residency": None,
    }
    alone = stage.model_copy(update=changes)
    honoured = ("residency",) not in unhonoured_by_residency(alone)
    return alone.model_copy(update={"residency": (stage.residency or _ROOM) if honoured else None})


async def _steps(
    stage: StageConfig, policy: Policy, tasks: StageTasks, context: RunContext, index: int, groups: int
) -> list[Sample]:
    """Steps with so many groups; the first is not counted."""
    run = StageRun(stage, policy, tasks, context, index=index, first_version=0)
    samples: list[Sample] = []
    try:
        run.begin({})
        began = time.perf_counter()
        await _sample(run, groups)
        while len(samples) < _MIN_STEPS or (len(samples) < _MAX_STEPS and time.perf_counter() - began < _STEPS_S):
            samples.append(await _sample(run, groups))
    finally:
        await run.close()
    return samples


async def _sample(run: StageRun, groups: int) -> Sample:
    peaks, idle = Peaks(run.policy.device), _taken(run.policy.device)
    peaks.begin("train")
    with watched(run.engine) as passes:
        result = await run.step()
    memory = {phase: 1e9 * result.metrics.get(f"memory/{phase}", 0.0) for phase in ("rollout", "inference", "train")}
    memory = {phase: peak for phase, peak in memory.items() if peak} or dict(peaks.take())
    engine, found = run.engine, result.experiences
    cache = engine.cache_bytes() if isinstance(engine, NativeEngine) else 0
    usual = [each for each in found if each.source is Source.USUAL]
    by_group = _by_group(usual)
    learned = _share_learned(found)
    tokens = [_trained_tokens(each) for each in _by_group(found).values()]
    return Sample(
        groups,
        result.seconds,
        memory,
        idle,
        cache,
        passes,
        [[each.action_tokens for each in one_per_rollout(group)] for group in by_group.values()],
        sum(each.stop_reason is StopReason.LENGTH for each in usual),
        [_prefix(group[0]) for group in by_group.values()],
        result.generated_tokens,
        sum(tokens),
        sum(each.action_tokens for each in found),
        max(tokens, default=0),
        learned,
        _learn(run, found),
    )


def _taken(device: torch.device) -> float:
    """Bytes taken now: the process's resident set on a CPU, torch's allocations on a GPU."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    return float(psutil.Process().memory_info().rss)


@contextmanager
def watched(engine: Any) -> Iterator[list[Pass]]:
    """Notes each step of a native engine inside."""
    passes: list[Pass] = []
    if not isinstance(engine, NativeEngine):
        yield passes
        return
    step = engine.step

    def timed() -> None:
        (attended, prompt), tokens, began = engine.load(), engine.tokens_generated, time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        passes.append(Pass(seconds, engine.tokens_generated - tokens, attended, prompt - engine.load()[1]))

    engine.step = timed  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        engine.step = step  # type: ignore[method-assign]


def _by_group(experiences: Sequence[Experience]) -> dict[str, list[Experience]]:
    groups: dict[str, list[Experience]] = {}
    for each in experiences:
        groups.setdefault(each.group, []).append(each)
    return groups


def _prefix(experience: Experience) -> int:
    """Tokens before the first that the policy wrote."""
    return int(experience.action_mask.argmax())


def _trained_tokens(group: Sequence[Experience]) -> int:
    """Tokens of the trainer's rows for a group: the prompt counts once."""
    prefixes = {each.token_ids[: _prefix(each)].tobytes(): _prefix(each) for each in group}
    return sum(prefixes.values()) + sum(len(each.token_ids) - _prefix(each) for each in group)


def _share_learned(experiences: Sequence[Experience]) -> float:
    usual = [each for each in experiences if each.source is Source.USUAL]
    silent = sum(each.advantage is not None and not each.advantage.any() for each in usual)
    return 1 - silent / max(len(usual), 1)


def _learn(run: StageRun, experiences: Sequence[Experience]) -> float:
    """Seconds of a training step on these experiences, with rewards that differ within each group."""
    for number, each in enumerate(experiences):
        each.versions[each.versions >= 0] = run.version
        if each.reward is not None:
            each.reward = float(number % 2)
            each.reward_parts = dict.fromkeys(each.reward_parts, each.reward)
    began = time.perf_counter()
    run.learn(list(experiences))
    return time.perf_counter() - began


def transfer(policy: Policy, precision: str) -> tuple[float, float]:
    """Seconds to send all trained weights through shared memory, and to receive them; medians of three."""
    weights = trained(policy)
    copies = {name: torch.empty_like(each, device="cpu") for name, each in weights.items()}
    place = shared_folder() / f"rollmill-plan-{uuid.uuid4().hex}"
    sender = SharedSender(place, weights, dtype=torch.bfloat16 if precision == "bf16" else None)
    receiver, times = SharedReceiver(place), []
    try:
        for version in range(4):
            began = time.perf_counter()
            sender.send(version, weights)
            sent = time.perf_counter()
            receiver.receive(copies)
            times.append((sent - began, time.perf_counter() - sent))
    finally:
        receiver.close()
        sender.close()
    return statistics.median(each for each, _ in times[1:]), statistics.median(each for _, each in times[1:])


def _present(stage: StageConfig, policy: Policy, sizes: dict[str, int], context: RunContext) -> dict[str, int]:
    if stage.residency is None:
        return {"train": sum(sizes.values())}
    return {str(phase): size for phase, size in plan_of(stage, policy, context.precision).sizes.items()}
