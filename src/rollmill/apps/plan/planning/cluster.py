"""Plans a run on a cluster of GPUs of a kind: the best split, its speed, what limits it, and its memory.

Costs are estimates from data sheets. Splits are compared with the fast simulation of `planning/simulation.py`; the best
one is then run by the orchestrator's own code on virtual time (`simulation/`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollmill.apps.plan.planning.cluster_costs import (
    ClusterModel,
    ExplorerCosts,
    cluster_costs,
    gpu_kind,
    read_cluster_model,
    smallest_explorer,
    trainer_memory,
)
from rollmill.apps.plan.planning.presets import load_planned_run, planned_model
from rollmill.apps.plan.planning.simulation import simulate_stage
from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.apps.plan.simulation.steps import simulate_steps
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.models.gpu_kinds import MEMORY_USABLE, GPUKind
from rollmill.orchestrator.pacing import Pacing

GPU_COUNTS = (8, 64, 512)
PROMPT_TOKENS = 256
_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
_FAST_STEPS, _COMPLETIONS, _MIN_STEPS, _MAX_STEPS = 8, 4096, 4, 12
_ENDLESS = 10**6
TRAINER, DECODING, LONGEST, WEIGHTS = "training", "decoding", "the longest completions", "the transfer of weights"


@dataclass(frozen=True)
class ClusterPlan:
    """The plan of a stage on a number of GPUs. Memory is in bytes per GPU."""

    stage: str
    gpus: int
    trainer_ranks: int
    explorers: int
    gpus_of_explorer: int
    max_staleness: int
    steps_per_s: float
    tokens_per_s: float
    waits: float  #: share of its time that the trainer waits for rollouts
    bottleneck: str
    bounds: dict[str, float]  #: seconds of a step that each part would take alone
    trainer_memory: float
    explorer_memory: float
    too_large: bool  #: more memory than the GPUs have

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_cluster(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    kind: str,
    counts: Sequence[int] = GPU_COUNTS,
    prompt_tokens: int = PROMPT_TOKENS,
    mean_tokens: float | None = None,
    model: str | None = None,
) -> list[ClusterPlan]:
    """Plan every stage of a run that rolls out, for each number of GPUs. Nothing is measured or loaded.

    Args:
        path: the run file.
        overrides: `section.key=value` strings.
        kind: a key of GPU_KINDS.
        counts: numbers of GPUs, at least 2 each.
        prompt_tokens: tokens of a prompt.
        mean_tokens: mean tokens of a completion; None: half of rollout.max_new_tokens.
        model: a preset or a folder instead of the run file's model; then the run's files need not be here yet.

    Raises:
        ConfigError: the run file is wrong, the kind is unknown, no stage rolls out, or the model fits no node.
        ModelError: the model's folder holds no causal language model.
    """
    gpu, loaded = gpu_kind(kind), load_planned_run(path, overrides, model)
    stages = [stage for stage in loaded.stages if stage.algorithm.uses_rollouts and stage.workflow.uses_tasks]
    if not stages:
        raise ConfigError(f"{path}: no stage rolls out tasks, so there is nothing to split; plan it without --cluster")
    if wrong := [count for count in counts if count < 2]:
        raise ConfigError(f"--gpus {wrong[0]}: a trainer and an explorer need 2 GPUs at least")
    first = read_cluster_model(planned_model(model, loaded.config.model), stages[0], prompt_tokens, mean_tokens)
    sizes = [first, *(first.like(stage, mean_tokens) for stage in stages[1:])]
    return [plan_stage_on(each, gpu, count) for each in sizes for count in counts]


def plan_stage_on(model: ClusterModel, kind: GPUKind, gpus: int) -> ClusterPlan:
    """Plan a stage on so many GPUs."""
    rates = []
    for ranks, explorer, count in _splits(model, kind, gpus):
        fitted = model.fitted(kind.memory, ranks)
        costs = cluster_costs(fitted, kind, explorer, ranks, seed=0)
        pacing = Pacing(model.stage.rollout.batch, model.stage.max_staleness, _ENDLESS)
        steps = _FAST_STEPS + 2 * model.stage.max_staleness
        fast = simulate_stage(costs, pacing, count, steps=steps, max_sequences=explorer.max_sequences)
        memory = trainer_memory(fitted, ranks)
        fits = memory <= MEMORY_USABLE * kind.memory
        rates.append(((not fits, fast.step_s()), ranks, explorer, count, costs, memory))
    (too_large, _), ranks, explorer, count, costs, memory = min(rates, key=lambda each: each[0])
    batch = model.stage.rollout.batch
    size = batch * model.stage.rollout.group_size
    steps = max(_MIN_STEPS, min(_MAX_STEPS, _COMPLETIONS // size)) + model.stage.max_staleness
    done = simulate_steps(model.stage, costs, count, steps=steps, max_sequences=explorer.max_sequences)
    tokens = statistics.mean(map(sum, costs.groups)) * batch
    bounds = _bounds(model.stage, costs, explorer, count)
    return ClusterPlan(
        model.stage.name,
        gpus,
        ranks,
        count,
        explorer.gpus,
        model.stage.max_staleness,
        1 / done.step_s(),
        tokens / done.step_s(),
        done.waits(),
        max(bounds, key=lambda name: bounds[name]),
        bounds,
        memory,
        explorer.memory,
        too_large,
    )


def _splits(model: ClusterModel, kind: GPUKind, gpus: int) -> Iterator[tuple[int, ExplorerCosts, int]]:
    """Yield splits: ranks of the trainer, the kind of explorers, and their number."""
    rollout = model.stage.rollout
    under_way = rollout.batch * rollout.group_size * (model.stage.max_staleness + 1)
    explorer = smallest_explorer(model, kind, sequences=rollout.max_sequences)
    if explorer.gpus >= gpus:
        raise ConfigError(f"{gpus} GPUs have no room for a trainer beside one explorer on {explorer.gpus}; give more")
    for ranks in sorted({max(1, round(gpus * share)) for share in _SHARES}):
        count = (gpus - ranks) // explorer.gpus
        if count:
            each = math.ceil(under_way / count)
            yield gpus - count * explorer.gpus, smallest_explorer(model, kind, sequences=each), count


def _bounds(stage: StageConfig, costs: SimulationCosts, explorer: ExplorerCosts, explorers: int) -> dict[str, float]:
    """Seconds of a step that training, decoding, the longest completions and the transfer of weights take alone.

    Without staleness all of them follow each other; then the longest of them limits most.
    """
    batch, ahead = stage.rollout.batch, stage.max_staleness + 1
    lengths = [length for group in costs.groups for length in group]
    mean = statistics.mean(lengths)
    rows = min(explorer.max_sequences, max(1.0, batch * ahead * stage.rollout.group_size / explorers))
    pass_s = costs.pass_s + costs.row_s * rows
    completions = batch * stage.rollout.group_size / explorers
    # without staleness a step waits for its longest completion; with it, steps share the wait
    return {
        TRAINER: statistics.mean(costs.train_s),
        DECODING: max(completions, 1.0) * mean / rows * pass_s + batch * costs.group_s / explorers,
        LONGEST: (max(lengths) - mean) * pass_s / ahead,
        WEIGHTS: costs.publish_s + costs.receive_s + costs.recompute_s * min(rows, completions),
    }
