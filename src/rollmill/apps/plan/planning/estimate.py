"""Estimates a run in one process on this machine without building its model: memory by phase, and seconds of a step.

The model exists on torch's meta device only. Seconds follow from two probes of the device, of a product and of a copy,
with the shares of both that planning/gpus.py assumes of a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from rollmill.apps.plan.planning.calibration import groups_per_step
from rollmill.apps.plan.planning.cluster_costs import (
    ClusterModel,
    activation_bytes,
    autocast_bytes,
    read_cluster_model,
    trained_passes,
)
from rollmill.apps.plan.planning.gpus import BANDWIDTH_REACHED, FLOPS_REACHED
from rollmill.apps.plan.planning.measurement import MIN_STEPS
from rollmill.apps.plan.planning.memory import GB, PhaseMemory, too_large
from rollmill.apps.plan.planning.presets import load_planned_run, planned_model
from rollmill.config.checks.offload import component_phases, stage_phases
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.run import StageConfig
from rollmill.models.cpu.step_timing import CPU_ROW
from rollmill.models.load import PolicyModel
from rollmill.offload.plan import estimate_component_sizes
from rollmill.orchestrator.setup import choose_device

_MEASURED_SHARE = 1 / 8 + 1 / 4  # of a batch: the sizes that a measurement always makes
_PATIENCE_S = 120.0
_PROCESS = 900_000_000
"""Python with its libraries and a tokenizer, and what the heap keeps between blocks in use; on a GPU, the context of
CUDA and the libraries' workspaces."""
_SAMPLED_LOGIT = 12
"""Bytes of a logit of a decoding step: logits and probabilities in fp32, and their sums."""
_PROBE_WIDTH, _PROBE_BYTES, _PROBE_S = 1024, 1 << 26, 0.1


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
    memory: dict[str, PhaseMemory]  #: by phase, without offloading
    least: dict[str, PhaseMemory]  #: with everything offloaded that a phase does not need
    limit: float  #: memory of the device
    free: float  #: of it, what nothing uses now
    seconds: dict[str, float]
    too_large: list[str]

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
) -> list[StageEstimate]:
    """Estimates every stage of a run. Needs the memory of no weights and a few seconds, whatever the model's size.

    Args:
        path: the run file; with `model` its files need not be here yet.
        overrides: `section.key=value` strings.
        model: a preset or a folder instead of the run file's model.
        memory_gb: memory of the device; default: this machine's.
        prompt_tokens: tokens of a prompt.
        mean_tokens: mean tokens of a completion; None: half of rollout.max_new_tokens.

    Raises:
        ConfigError: the run file is wrong, or the model is unknown.
        ModelError: the model's folder holds no causal language model.
    """
    loaded = load_planned_run(path, overrides, model)
    config, device = planned_model(model, loaded.config.model), choose_device(loaded.config.device)
    sizes = [read_cluster_model(config, stage, prompt_tokens, mean_tokens) for stage in loaded.stages[:1]]
    sizes += [ClusterModel.like(sizes[0], stage, mean_tokens) for stage in loaded.stages[1:]]
    return [estimate_stage(each, device, memory_gb) for each in sizes]


def estimate_stage(model: ClusterModel, device: torch.device, memory_gb: float | None = None) -> StageEstimate:
    """Estimates a stage in one process on a device."""
    stage = model.stage
    rates = {name: _products_per_second(device, name) for name in _precisions(stage, device)}
    precision = max(rates, key=lambda name: rates[name])
    policy: Any = PolicyModel(model.model, None, frozenset(), 0, 0, device)
    sizes = estimate_component_sizes(stage, policy, precision)
    needs = component_phases(stage) | {"gradients": frozenset({"train"})}
    completions = groups_per_step(stage) * stage.rollout.group_size
    together = min(completions, stage.rollout.max_sequences)
    memory: dict[str, PhaseMemory] = {}
    least: dict[str, PhaseMemory] = {}
    for phase in stage_phases(stage):
        here = {name: float(size) for name, size in sizes.items() if name != "gradients" or phase == "train"}
        if stage.algorithm.uses_rollouts and "cache" in here:
            of_completion = model.longest * model.cache_bytes * (1 if precision == "bf16" else 2)
            here["cache"] = float(together * of_completion)
            if isinstance(stage.engine, NativeEngineConfig) and any(not each.single_turn for each in stage.workflows):
                here["cache"] += min(stage.engine.prefix_cache_gb * 2**30, completions * of_completion)
        work = _work_bytes(model, phase, precision, device, sizes["gradients"])
        always = {"work": work, "process": float(_PROCESS)}
        memory[phase] = PhaseMemory({name: size for name, size in (here | always).items() if size > 0})
        kept = {name: size for name, size in here.items() if phase in needs.get(name, ())}
        least[phase] = PhaseMemory({name: size for name, size in (kept | always).items() if size > 0})
    total, free = _memory_of(device)
    limit = total if memory_gb is None else memory_gb * GB
    problems = list(too_large(stage, memory if stage.offload is None else least, least, limit))
    seconds = _seconds(model, sizes, rates[precision], _bytes_per_second(device), precision)
    trained = sum(each.numel() for each in model.model.parameters() if each.requires_grad)
    return StageEstimate(
        stage.name,
        device.type,
        precision,
        model.parameters,
        trained,
        model.prompt,
        model.mean,
        memory,
        least,
        limit,
        free,
        seconds,
        problems,
    )


def _work_bytes(model: ClusterModel, phase: str, precision: str, device: torch.device, gradients: int) -> float:
    """Bytes of what a phase computes with and then frees, at its peak.

    In an update's first micro-batch the gradients come to be while the activations go; only the activations of a later
    one exist beside all gradients. A CPU that has AVX-512 without products of bf16 sums a gradient of a weight in fp32,
    in memory of its own.
    """
    rollout, trainer = model.stage.rollout, model.stage.trainer
    if phase == "rollout":
        rows = min(groups_per_step(model.stage) * rollout.group_size, rollout.max_sequences)
        return float(_SAMPLED_LOGIT * rows * len(model.model.get_output_embeddings().weight))
    if phase != "train":
        return 0.0
    limit = min(trainer.micro_batch_tokens, CPU_ROW) if device.type == "cpu" else trainer.micro_batch_tokens
    weights = [model.model.get_output_embeddings().weight, *(each.weight for _, each in model.linears())]
    sums = max((4 * each.numel() for each in weights if each.requires_grad), default=0)
    if device.type != "cpu" or not torch.cpu._is_avx512_supported() or torch.cpu._is_avx512_bf16_supported():
        sums = 0

    def work(tokens: float) -> float:
        if precision == "bf16":
            return activation_bytes(model, tokens) + autocast_bytes(model) + sums
        return 2 * activation_bytes(model, tokens)

    first = min(model.step_tokens, limit)
    second = min(model.step_tokens - first, limit)
    return max(work(first) - gradients, work(second) if second else 0.0)


def _seconds(
    model: ClusterModel, sizes: dict[str, int], products: float, copies: float, precision: str
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
    tokens = (
        model.step_tokens if stage.algorithm.uses_rollouts else groups_per_step(stage) * (model.prompt + model.mean)
    )
    found["train"] = trained_passes(stage, sizes) * model.parameters * tokens / flops
    return found | {"total": sum(found.values())}


def _precisions(stage: StageConfig, device: torch.device) -> list[str]:
    chosen = stage.trainer.precision
    return [chosen] if chosen != "auto" else ["bf16"] if device.type == "cuda" else ["fp32", "bf16"]


def _memory_of(device: torch.device) -> tuple[float, float]:
    """Bytes of the device: all, and free ones."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total), float(free)
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
