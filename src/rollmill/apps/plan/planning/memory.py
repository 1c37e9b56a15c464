"""Predicts the device memory of each phase: with and without offloading, per rank, and per explorer process."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.apps.plan.planning.calibration import PAST_COPIES, Calibration
from rollmill.apps.plan.planning.measurement import StepMeasurement
from rollmill.apps.plan.planning.rollouts import GroupLengths, fit_line, reserved_cache_tokens
from rollmill.config.checks.offload import component_phases, stage_phases
from rollmill.models.cpu.step_timing import CPU_ROW
from rollmill.orchestrator.stage_memory import MemoryByPhase, PhaseMemory

_GRADIENTS, _CACHE = "gradients", "cache"
_TRAINED = ("policy", "optimizer", _GRADIENTS, "critic", "critic_optimizer", "reference")
"""Components that every rank has, and that shards split."""
_ROLLS_OUT = ("policy", "cast", "rewards")


class MemoryModel:
    """Memory model fitted to the measured peaks of a stage."""

    def __init__(self, found: Calibration) -> None:
        self._found, self._stage = found, found.stage
        self._phases = [each for each in found.samples[0].memory if each in stage_phases(found.stage)]
        self._base = max(self._base_of(sample) for sample in found.samples)

    def of_run(self, groups: list[GroupLengths]) -> MemoryByPhase:
        """Memory without offloading."""
        return {phase: self._memory(phase, self._everything(phase), groups) for phase in self._phases}

    def with_offload(self, groups: list[GroupLengths]) -> MemoryByPhase:
        """Memory with only the needed components on the device in each phase: the minimum that `offload` achieves."""
        return {phase: self._memory(phase, self._needed(phase), groups) for phase in self._phases}

    def for_rank(self, groups: list[GroupLengths], ranks: int, sharding: str, *, first: bool) -> PhaseMemory:
        """Memory of phase `train` on one of several ranks; only the first rolls out."""
        here = self._everything("train")
        if not first:
            here = {name: size for name, size in here.items() if name in _TRAINED}
        if sharding == "fsdp":
            whole = here["policy"] if first and "cast" not in here else 0.0
            here = {name: size / ranks if name in _TRAINED else size for name, size in here.items()}
            here["policy"] += whole  # rollouts decode with a whole copy, if not with the cast
        share = 1 / ranks if sharding == "context" else 1.0
        return self._memory("train", here, groups if first else [], row_share=share)

    def for_explorer(self, groups: list[GroupLengths]) -> PhaseMemory:
        """Memory of a process that only rolls out."""
        everything = self._everything("rollout")
        return self._memory("rollout", {name: everything[name] for name in _ROLLS_OUT if name in everything}, groups)

    def for_trainer(self, groups: list[GroupLengths]) -> PhaseMemory:
        """Memory of a trainer with remote explorers."""
        here = {name: size for name, size in self._everything("train").items() if name not in ("cast", "rewards")}
        return self._memory("train", here, [])

    def _everything(self, phase: str) -> dict[str, float]:
        sizes = {name: float(size) for name, size in self._found.sizes.items() if name != _CACHE}
        return {name: size for name, size in sizes.items() if name != _GRADIENTS or phase == "train"}

    def _needed(self, phase: str) -> dict[str, float]:
        needs = {name: set(phases) for name, phases in component_phases(self._stage).items()}
        if self._found.precision == "bf16" and self._stage.trainer.param_dtype == "fp32":  # rollouts use the cast only
            needs["policy"].discard("rollout")
        needs[_GRADIENTS] = {"train"}
        everything = self._everything(phase).items()
        found = {name: size for name, size in everything if phase in needs.get(name, ()) or name == PAST_COPIES}
        return found if phase == "rollout" else {**found, _CACHE: 0.0}

    def _memory(
        self, phase: str, here: Mapping[str, float], groups: list[GroupLengths], row_share: float = 1.0
    ) -> PhaseMemory:
        parts = dict(here)
        if _CACHE not in parts:
            parts[_CACHE] = self._cache(groups)
        parts |= {"work": self._work(phase, row_share), "process": self._base}
        return PhaseMemory({name: size for name, size in parts.items() if size > 0})

    def _cache(self, groups: list[GroupLengths]) -> float:
        """Bytes of the KV cache: tokens that the engine reserves, times the measured bytes per token."""
        measured = [
            (reserved_cache_tokens(_groups_of(sample), self._stage.rollout.max_sequences), sample.cache_bytes)
            for sample in self._found.samples
            if sample.cache_bytes
        ]
        if not measured or not groups:
            return 0.0
        per_token = max(size / tokens for tokens, size in measured)
        return per_token * reserved_cache_tokens(groups, self._stage.rollout.max_sequences)

    def _base_of(self, sample: StepMeasurement) -> float:
        """Memory in use between two steps, besides components and cache."""
        gradients = self._found.sizes.get(_GRADIENTS, 0)
        return max(sample.idle - (self._found.present["train"] - gradients) - sample.cache_bytes, 0.0)

    def _work(self, phase: str, row_share: float) -> float:
        """Activations, logits and the like: linear in the completions decoded together, or in the tokens of a row, of
        which ranks may have a share.
        """
        pairs = []
        for sample in self._found.samples:
            known = self._found.present[phase] + sample.cache_bytes + self._base_of(sample)
            pairs.append((self._measure(phase, sample), max(sample.memory[phase] - known, 0.0)))
        constant, slope = fit_line([x for x, _ in pairs], [y for _, y in pairs])
        return constant + slope * row_share * self._run_measure(phase)

    def _measure(self, phase: str, sample: StepMeasurement) -> float:
        if phase == "rollout":
            return min(sum(map(len, sample.lengths)), self._stage.rollout.max_sequences)
        return self._row(sample.trained, sample.largest)

    def _run_measure(self, phase: str) -> float:
        stage, samples = self._stage, self._found.samples
        if phase == "rollout":
            return min(stage.groups_per_step * stage.rollout.group_size, stage.rollout.max_sequences)
        per_group = sum(sample.trained for sample in samples) / sum(sample.groups for sample in samples)
        return self._row(stage.groups_per_step * per_group, max(sample.largest for sample in samples))

    def _row(self, tokens: float, largest: float) -> float:
        """Tokens of the longest micro-batch; a group is split only if it is longer than a micro-batch."""
        budget = self._stage.trainer.micro_batch_tokens
        limit = min(budget, CPU_ROW) if self._found.device.type == "cpu" else budget
        return min(tokens, max(limit, min(largest, budget)))


def _groups_of(sample: StepMeasurement) -> list[GroupLengths]:
    return [GroupLengths(prompt, lengths) for prompt, lengths in zip(sample.prompts, sample.lengths, strict=True)]
