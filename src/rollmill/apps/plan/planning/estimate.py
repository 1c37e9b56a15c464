"""Estimates a run in one process without building its model, on this machine or on one GPU of a kind: memory by phase,
and seconds of a step.

The model exists on torch's meta device only. Seconds follow from two probes of this machine's device, of a product and
of a copy, or from a GPU's data sheet, with the shares of both that cluster_costs.py assumes of a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from rollmill.apps.plan.planning.cluster_costs import (
    BANDWIDTH_REACHED,
    FLOPS_REACHED,
    ClusterModel,
    gpu_kind,
    read_cluster_model,
    trained_passes,
)
from rollmill.apps.plan.planning.measurement import MIN_STEPS
from rollmill.apps.plan.planning.presets import load_planned_run, planned_model
from rollmill.config.run import StageConfig
from rollmill.models.gpu_kinds import MEMORY_USABLE, nominal_memory
from rollmill.models.load import build_meta_policy
from rollmill.offload.plan import GB
from rollmill.orchestrator.memory_choice import MemoryChoice, choose_memory, explorers_beside
from rollmill.orchestrator.setup import choose_device
from rollmill.orchestrator.stage_memory import MemoryByPhase, StageModel, too_large

_MEASURED_SHARE = 1 / 8 + 1 / 4  # of a batch: the sizes that a measurement always makes
_PATIENCE_S = 120.0
_FP32_RATE = 1 / 15  # of a GPU's products in bf16
_PROBE_WIDTH, _PROBE_BYTES, _PROBE_S = 1024, 1 << 26, 0.1


@dataclass(frozen=True)
class Machine:
    """The device that a stage is estimated for: this machine's, or a GPU of a kind that is not here."""

    device: str  #: cpu or cuda
    name: str  #: for the user
    total: float  #: bytes; of a GPU those of its data sheet
    free: float  #: of these, what nothing uses now
    products: Callable[[str], float]  #: floating-point operations per second in a precision
    copies: Callable[[], float]  #: bytes per second of its memory

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        total, free = _memory_of(device)
        products = lambda precision: _products_per_second(device, precision)  # noqa: E731
        return cls(device.type, device.type, total, free, products, lambda: _bytes_per_second(device))

    @classmethod
    def of_kind(cls, name: str) -> Machine:
        """Raises ConfigError for an unknown kind of GPU."""
        kind = gpu_kind(name)
        rates = {"bf16": kind.flops, "fp32": _FP32_RATE * kind.flops}
        return cls("cuda", f"one {name}", kind.memory, kind.memory, rates.__getitem__, lambda: kind.bandwidth)


@dataclass(frozen=True)
class StageEstimate:
    """The estimate of a stage in one process. Bytes and seconds."""

    stage: str
    device: str
    precision: str
    parameters: int
    trained: int  #: parameters that learn; fewer with LoRA
    prompt_tokens: int  #: assumed
    mean_tokens: float  #: of a completion, assumed
    memory: MemoryByPhase  #: without offloading
    least: MemoryByPhase  #: with everything offloaded that a phase does not need
    limit: float  #: memory of the device that may be used
    free: float  #: memory of the device that nothing uses now
    seconds: dict[str, float]
    too_large: list[str]
    chosen: Mapping[str, Any]  #: values of the keys that decide on memory; {} on a CPU, where nothing is chosen

    @property
    def obstacle(self) -> str | None:
        """Reason why a measurement of the run on this device would be refused or endless; None if there is none."""
        peak = max(each.total for each in self.memory.values())
        if peak > self.free:
            return f"the run takes about {peak / GB:.3g} GB, and {self.free / GB:.3g} GB of {self.device} are free"
        measuring = (1 + MIN_STEPS) * _MEASURED_SHARE * self.seconds["total"]
        if measuring > _PATIENCE_S:
            return f"measuring it would take about {measuring / 60:.0f} minutes"
        return None

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON, in seconds and bytes."""
        bytes_of = {
            name: {phase: each.parts | {"total": each.total} for phase, each in phases.items()}
            for name, phases in (("memory", self.memory), ("memory_with_offload", self.least))
        }
        return asdict(self) | bytes_of | {"obstacle": self.obstacle}


def estimate_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    memory_gb: float | None = None,
    prompt_tokens: int,
    mean_tokens: float | None = None,
    kind: str | None = None,
) -> list[StageEstimate]:
    """Estimates every stage of a run. Needs the memory of no weights and a few seconds, whatever the model's size.

    Args:
        path: the run file; with `model` its files need not be here yet.
        overrides: `section.key=value` strings.
        model: a preset or a folder instead of the run file's model.
        memory_gb: memory of the device; default: this machine's, or that of the kind.
        prompt_tokens: tokens of a prompt.
        mean_tokens: mean tokens of a completion; None: half of rollout.max_new_tokens.
        kind: a kind of GPU that is not here; None: the device of the run on this machine.

    Raises:
        ConfigError: the run file is wrong, or the model or the kind is unknown.
        ModelError: the model's folder holds no causal language model.
    """
    loaded = load_planned_run(path, overrides, model)
    config = planned_model(model, loaded.config.model)
    machine = Machine.here(choose_device(loaded.config.device)) if kind is None else Machine.of_kind(kind)
    if machine.device == "cpu":
        first = read_cluster_model(config, loaded.stages[0], prompt_tokens, mean_tokens)
        sizes = [first, *(first.like(stage, mean_tokens) for stage in loaded.stages[1:])]
        return [estimate_stage(each, machine, memory_gb) for each in sizes]
    memory = machine.total if memory_gb is None else memory_gb * GB
    beside = explorers_beside(loaded.config, loaded.stages)
    choices = choose_memory(loaded.stages, build_meta_policy(config), memory, beside)
    return [
        estimate_stage(ClusterModel.of(each.stage, each.model, prompt_tokens, mean_tokens), machine, memory_gb, each)
        for each in choices
    ]


def estimate_stage(
    model: ClusterModel, machine: Machine, memory_gb: float | None = None, choice: MemoryChoice | None = None
) -> StageEstimate:
    """Estimates a stage in one process on a device; on a GPU with the choice that a run would make there."""
    stage = model.stage
    rates = {name: machine.products(name) for name in _precisions(stage, machine.device)}
    precision = max(rates, key=lambda name: rates[name])
    sized = StageModel(stage, model.model, machine.device, precision, model.tokens)
    cache_gb: Any = getattr(stage.engine, "cache_gb", "auto")
    memory, least = sized.memory(None if cache_gb == "auto" else cache_gb * 2**30)
    total = machine.total if memory_gb is None else memory_gb * GB
    limit = total if machine.device == "cpu" else MEMORY_USABLE * total
    problems = too_large(stage, memory if stage.offload is None else least, least, limit)
    return StageEstimate(
        stage=stage.name,
        device=machine.name,
        precision=precision,
        parameters=model.parameters,
        trained=sum(each.numel() for each in model.model.parameters() if each.requires_grad),
        prompt_tokens=model.prompt,
        mean_tokens=model.mean,
        memory=memory,
        least=least,
        limit=limit,
        free=machine.free,
        seconds=_seconds(model, sized.components(), rates[precision], machine.copies(), precision),
        too_large=list(problems if choice is None else choice.problems),
        chosen={} if choice is None else choice.values,
    )


def _seconds(
    model: ClusterModel, components: Mapping[str, float], products: float, copies: float, precision: str
) -> dict[str, float]:
    """Seconds of each phase of a step, at the rates that are reached."""
    stage = model.stage
    flops, read = FLOPS_REACHED * products, BANDWIDTH_REACHED * copies
    width = 2 if precision == "bf16" else 4
    weights = width * model.parameters
    rollout = stage.rollout
    found: dict[str, float] = {}
    if stage.algorithm.uses_rollouts:
        completions = rollout.batch * rollout.group_size
        rounds = math.ceil(completions / rollout.max_sequences)
        context = model.prompt + model.mean / 2
        cache_bytes = completions * model.mean * context * model.cache_bytes * width / 2
        passes = rounds * min(rollout.max_new_tokens, 2 * model.mean)
        computed = 2 * model.parameters * (completions * model.mean + rollout.batch * model.prompt)
        found["rollout"] = computed / flops + (passes * weights + cache_bytes) / read
    tokens = model.step_tokens if stage.algorithm.uses_rollouts else stage.groups_per_step * (model.prompt + model.mean)
    found["train"] = trained_passes(stage, components) * model.parameters * tokens / flops
    return found | {"total": sum(found.values())}


def _precisions(stage: StageConfig, device: str) -> list[str]:
    chosen = stage.trainer.precision
    return [chosen] if chosen != "auto" else ["bf16"] if device == "cuda" else ["fp32", "bf16"]


def _memory_of(device: torch.device) -> tuple[float, float]:
    """Bytes of the device: all, and free ones."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return nominal_memory(torch.cuda.get_device_name(device), float(total)), float(free)
    memory = psutil.virtual_memory()
    return float(memory.total), float(memory.available)


@cache
def _products_per_second(device: torch.device, precision: str) -> float:
    """Floating-point operations per second of a square product, the best of a tenth of a second."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(_PROBE_WIDTH, _PROBE_WIDTH, device=device, dtype=kind)
    return 2 * _PROBE_WIDTH**3 / _fastest(lambda: x @ x, device)


@cache
def _bytes_per_second(device: torch.device) -> float:
    """Bytes per second that the device's memory delivers."""
    x = torch.ones(_PROBE_BYTES // 4, device=device)
    return _PROBE_BYTES / _fastest(lambda: x.sum(), device)


def _fastest(work: Any, device: torch.device) -> float:
    best, end = math.inf, time.perf_counter() + _PROBE_S
    while best == math.inf or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
