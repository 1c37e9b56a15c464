"""Plans a run: time and memory of each stage on this machine or another, and the split into processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rollmill.apps.plan.planning.calibration import Calibration, calibrate
from rollmill.apps.plan.planning.memory import MemoryModel
from rollmill.apps.plan.planning.prediction import StepPrediction, StepTimeModel, predict_step
from rollmill.apps.plan.planning.rollouts import draw_groups
from rollmill.apps.plan.planning.simulation import ProcessSplit, choose_split, enumerate_splits
from rollmill.config.loader import load_run
from rollmill.config.run import StageConfig
from rollmill.offload.plan import GB
from rollmill.orchestrator.stage_memory import MemoryByPhase, PhaseMemory, too_large

DEFAULT_TOKENS = 512


@dataclass(frozen=True)
class MachineSpec:
    """Resources that a run may use."""

    cores: int  #: or GPUs, if the run computes on one
    memory: float  #: bytes of the device


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage."""

    stage: StageConfig
    found: Calibration
    prediction: StepPrediction
    memory: MemoryByPhase  #: without offloading
    least: MemoryByPhase  #: with `offload`: only the components that each phase needs
    ranks: dict[str, PhaseMemory]  #: phase `train` by rank and sharding
    processes: dict[str, PhaseMemory]  #: trainer and explorer in separate processes
    splits: list[ProcessSplit]
    best: ProcessSplit
    too_large: list[str]

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON, in seconds, tokens and bytes."""
        memory = {"memory": self.memory, "memory_with_offload": self.least, "memory_by_rank": self.ranks}
        bytes_of = {
            name: {key: each.parts | {"total": each.total} for key, each in of.items()} for name, of in memory.items()
        }
        return {
            "stage": self.stage.name,
            "calibration": {
                "seconds": self.found.seconds,
                "steps": len(self.found.samples),
                "groups": sorted({sample.groups for sample in self.found.samples}),
                "device": str(self.found.device),
                "precision": self.found.precision,
                "threads": self.found.threads,
            },
            "step": asdict(self.prediction)
            | {
                "tokens_per_second": self.prediction.tokens_per_second,
                "decode_tokens_per_second": self.prediction.decode_tokens_per_second,
            },
            **bytes_of,
            "memory_apart": {name: each.total for name, each in self.processes.items()},
            "splits": [asdict(split) for split in self.splits],
            "best": asdict(self.best),
            "too_large": self.too_large,
        }


def plan_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    cores: int | None = None,
    memory_gb: float | None = None,
    max_tokens: int = DEFAULT_TOKENS,
) -> list[StagePlan]:
    """Measures a run's stages briefly and predicts their time and memory.

    Args:
        path: the run file.
        overrides: `section.key=value` strings.
        cores: cores to split, or GPUs if the run computes on one; default: those of this machine.
        memory_gb: memory of the device; default: this machine's.
        max_tokens: completions end after this many new tokens during the measurement.

    Raises:
        ConfigError: the run file is wrong, or cannot be measured in one process.
        RollmillError: a component failed; the message gives advice.
    """
    loaded = load_run(path, overrides)
    with tempfile.TemporaryDirectory(prefix="rollmill-plan-") as folder:
        found = calibrate(loaded, Path(folder), max_tokens=max_tokens)
    device = found[0].device
    memory = _device_memory(device) if memory_gb is None else memory_gb * GB
    machine = MachineSpec(_cores(device) if cores is None else cores, memory)
    return [plan_stage(each, machine) for each in found]


def plan_stage(found: Calibration, machine: MachineSpec) -> StagePlan:
    """Plans a measured stage."""
    model, stage = StepTimeModel(found), found.stage
    prediction = predict_step(model)
    groups = draw_groups(found, prediction.groups, seed=0) if found.rolls_out else []
    memory = MemoryModel(found)
    everything, least = memory.of_run(groups), memory.with_offload(groups)
    ranks = max(stage.trainer.ranks, 2)
    by_rank = {"1 rank": memory.for_rank(groups, 1, "none", first=True)}
    for sharding in ("none", "fsdp", "context"):
        for first in (True, False):
            key = f"{ranks} ranks, sharding {sharding}, {'first' if first else 'others'}"
            by_rank[key] = memory.for_rank(groups, ranks, sharding, first=first)
    apart: dict[str, PhaseMemory] = {}
    if groups:
        apart = {"trainer": memory.for_trainer(groups), "explorer": memory.for_explorer(groups)}
    splits = enumerate_splits(model, prediction, machine.cores // found.cores_each)
    splits = [split for split in splits if _fits(split, apart, machine, found.device)]
    best = choose_split(splits, max(stage.max_staleness, 1))
    chosen = everything if stage.offload is None else least
    large = list(too_large(stage, chosen, least, machine.memory))
    return StagePlan(stage, found, prediction, everything, least, by_rank, apart, splits, best, large)


def _fits(split: ProcessSplit, apart: dict[str, PhaseMemory], machine: MachineSpec, device: torch.device) -> bool:
    """True if the processes fit: together into a CPU's memory, or each onto its own GPU."""
    if not split.explorers:
        return True
    if device.type == "cuda":
        return max(each.total for each in apart.values()) <= machine.memory
    return apart["trainer"].total + split.explorers * apart["explorer"].total <= machine.memory


def _cores(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else len(os.sched_getaffinity(0))


def _device_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)
