"""Short measurements of a stage: a few steps of its own components with fewer groups, and its weight transfer."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollmill.apps.plan.planning.measurement import MIN_STEPS, StepMeasurement, measure_steps
from rollmill.config.algorithms.base import OfflineAlgorithmOptions, PolicyGradientOptions
from rollmill.config.checks.offload import unused_offload_keys
from rollmill.config.loader import LoadedRun
from rollmill.config.model import AuxiliaryModelConfig
from rollmill.config.offload import OffloadConfig
from rollmill.config.placement import PlacementConfig, RayPlacement
from rollmill.config.run import StageConfig
from rollmill.config.workflows import LiveRequestsWorkflow
from rollmill.errors import ConfigError
from rollmill.models.cpu.host_memory import trim_heap
from rollmill.models.load import PolicyModel
from rollmill.offload.plan import estimate_component_sizes
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.offload import build_offload_plan
from rollmill.orchestrator.setup import prepare_first_stage
from rollmill.orchestrator.task_selection import StageTasks
from rollmill.remote.stage_worker import trainable_parameters
from rollmill.rewards.resources import close_warm_pools
from rollmill.weights import SharedMemoryReceiver, SharedMemorySender, shared_memory_folder


def measure_weight_transfer(policy: PolicyModel, precision: str) -> tuple[float, float]:
    """Seconds to send all trained weights through shared memory, and to receive them; medians of three."""
    weights = trainable_parameters(policy)
    copies = {name: torch.empty_like(each, device="cpu") for name, each in weights.items()}
    place = shared_memory_folder() / f"rollmill-plan-{uuid.uuid4().hex}"
    sender = SharedMemorySender(place, weights, dtype=torch.bfloat16 if precision == "bf16" else None)
    receiver, times = SharedMemoryReceiver(place), []
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


_SHARES = 8, 4, 2  # divisors of the batch
_ENOUGH_S = 30.0
"""Once two group counts are measured, larger ones are measured only if expected to take at most this long."""
_UNLIMITED_BUDGET = OffloadConfig(budget_gb=1e6)  # moves nothing, but measures peaks by phase
_ENDLESS = 10**6
PAST_COPIES = "past_copies"
"""Component: the copies of the policy for models with `policy: past`."""


@dataclass(frozen=True)
class Calibration:
    """Measurements of a stage, and sizes of its components."""

    stage: StageConfig
    samples: list[StepMeasurement]
    sizes: dict[str, int]  #: bytes by component, see offload/plan.py, with `past_copies`
    present: dict[str, int]  #: bytes of components on the device during the measurement, by phase
    longest: int  #: maximum new tokens of a completion in the measurement
    publish_s: float  #: seconds to send new weights through shared memory
    receive_s: float  #: seconds to receive them
    device: torch.device
    precision: str
    threads: int
    seconds: float = field(default=0.0)  #: duration of the measurements

    @property
    def rolls_out(self) -> bool:
        """True if the stage has rollouts."""
        return self.stage.algorithm.uses_rollouts

    @property
    def cores_each(self) -> int:
        """Cores per process, as in the measurement; 1 GPU if the run computes on one."""
        return 1 if self.device.type == "cuda" else self.threads


def calibrate(loaded: LoadedRun, folder: Path, *, max_tokens: int) -> list[Calibration]:
    """Measures every stage of a run, each with the model of the run file.

    Args:
        folder: folder for the components' files.
        max_tokens: completions end after this many new tokens.

    Raises:
        ConfigError: a stage cannot be measured in one process.
        RollmillError: a component failed; the message gives advice.
    """
    for stage in loaded.stages:
        _check_stage(stage)
    _check_placement(loaded.config.placement)
    setup, context = prepare_first_stage(loaded, folder)
    try:
        return [
            asyncio.run(_calibrate_stage(stage, setup.policy, setup.tasks[index], context, index, max_tokens))
            for index, stage in enumerate(setup.loaded.stages)
        ]
    finally:
        close_warm_pools()


def _check_stage(stage: StageConfig) -> None:
    if isinstance(stage.workflow, LiveRequestsWorkflow):
        raise ConfigError(
            f"stage {stage.name}: workflow `live_requests` rolls out nothing by itself, so nothing can be measured; "
            "plan a run with another workflow"
        )
    if stage.algorithm.uses_rollouts and stage.engine.name != "native":
        raise ConfigError(
            f"stage {stage.name}: `plan` measures the native engine; add --set engine=native, and take the other "
            "engine's tokens per second from `python -m bench rollout`"
        )


def _check_placement(placement: PlacementConfig) -> None:
    for number, kind in enumerate(placement.explorers if isinstance(placement, RayPlacement) else []):
        if kind.engine is not None and kind.engine.name != "native":
            raise ConfigError(
                f"placement.explorers.{number}.engine: `plan` measures the native engine, and explorers that are "
                "alike; add --set placement.explorers=1"
            )


async def _calibrate_stage(
    stage: StageConfig, policy: PolicyModel, tasks: StageTasks, context: RunContext, index: int, max_tokens: int
) -> Calibration:
    began = time.perf_counter()
    longest = min(stage.rollout.max_new_tokens, max_tokens)
    batch = stage.groups_per_step
    samples: list[StepMeasurement] = []
    measured = stage
    for groups in sorted({max(1, batch // share) for share in _SHARES}):
        if len({sample.groups for sample in samples}) > 1 and _expected_s(samples[-1], groups) > _ENOUGH_S:
            break
        measured = _smaller(stage, groups, longest)
        samples += await measure_steps(measured, policy, tasks, context, index, groups)
        gc.collect()  # leftovers would count as memory of the next steps
        trim_heap()
    publish_s, receive_s = measure_weight_transfer(policy, context.precision)
    sizes = estimate_component_sizes(measured, policy, context.precision)
    present = _present(measured, policy, sizes, context)
    if copies := _past_copies(stage):
        each = sizes["policy"] + sizes.get("cast", 0)
        sizes[PAST_COPIES] = copies * each
        present = {phase: size + _past_copies(measured) * each for phase, size in present.items()}
    return Calibration(
        stage,
        samples,
        sizes,
        present,
        longest,
        publish_s,
        receive_s,
        policy.device,
        context.precision,
        context.threads,
        time.perf_counter() - began,
    )


def _expected_s(last: StepMeasurement, groups: int) -> float:
    """Expected seconds of the minimum number of steps with this many groups, each with a full training step."""
    return (1 + MIN_STEPS) * (last.seconds["total"] + last.full_s) * groups / last.groups


def _smaller(stage: StageConfig, groups: int, longest: int) -> StageConfig:
    """The stage with fewer groups in one process, with learning rate 0 and without evaluation and staleness."""
    algorithm = stage.algorithm
    if isinstance(algorithm, OfflineAlgorithmOptions):
        algorithm = algorithm.model_copy(update={"batch": groups})
    if isinstance(algorithm, PolicyGradientOptions):
        critic = algorithm.critic.model_copy(update={"warmup_steps": 0})
        algorithm = algorithm.model_copy(update={"critic": critic})
    rollout = {"batch": groups, "max_new_tokens": longest, "token_budget": None}
    changes: dict[str, Any] = {
        "steps": _ENDLESS,
        "max_staleness": 0,
        "sync_interval": 1,
        "algorithm": algorithm,
        "rollout": stage.rollout.model_copy(update=rollout),
        "trainer": stage.trainer.model_copy(update={"lr": 0.0, "ranks": 1, "sharding": "none"}),
        "evaluation": None,
        "early_stop": None,
        "offload": None,
        "models": _with_one_copy(stage.models),
        "domains": {
            name: each.model_copy(update={"models": each.models and _with_one_copy(each.models)})
            for name, each in stage.domains.items()
        },
    }
    alone = stage.model_copy(update=changes)
    honoured = ("offload",) not in unused_offload_keys(alone)
    return alone.model_copy(update={"offload": (stage.offload or _UNLIMITED_BUDGET) if honoured else None})


def _with_one_copy(models: dict[str, AuxiliaryModelConfig]) -> dict[str, AuxiliaryModelConfig]:
    """The models, with `policy: past` as it begins: one copy of the policy, and no more."""
    first = {"keep": 1, "every": _ENDLESS}
    return {name: each.model_copy(update=first if each.policy == "past" else {}) for name, each in models.items()}


def _past_copies(stage: StageConfig) -> int:
    """Number of copies of the policy that the stage keeps in the end, for all models with `policy: past`."""
    return sum(
        min(each.keep, stage.steps // each.every + 1) for each in stage.all_models.values() if each.policy == "past"
    )


def _present(stage: StageConfig, policy: PolicyModel, sizes: dict[str, int], context: RunContext) -> dict[str, int]:
    if stage.offload is None:
        return {"train": sum(sizes.values())}
    return {str(phase): size for phase, size in build_offload_plan(stage, policy, context.precision).sizes.items()}
