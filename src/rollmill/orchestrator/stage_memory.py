"""Memory of a stage by phase, from the shape of its model: what plans say, and a run's defaults follow from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch

from rollmill.config.checks.offload import component_phases, stage_phases, unused_offload_keys
from rollmill.config.offload import Phase
from rollmill.config.run import StageConfig
from rollmill.engines.vllm.build import WORK_BYTES
from rollmill.models.cpu.step_timing import CPU_ROW
from rollmill.models.load import PolicyModel
from rollmill.models.quantization import count_weights
from rollmill.offload.plan import GB, estimate_component_sizes
from rollmill.trainer.step_memory import PolicySizes, forward_work, gradient_sums, training_work

PROCESS_BYTES = 900_000_000
"""Python with its libraries and a tokenizer, and what the heap keeps between blocks in use; on a GPU, the context of
CUDA and the libraries' workspaces."""
PROMPT_TOKENS = 256
"""Tokens of a prompt that are assumed."""
_TURNS = 4
"""Turns of a conversation that are assumed."""
_SAMPLED_LOGIT = 12
"""Bytes of a logit of a decoding step: logits and probabilities in fp32, and their sums."""
_SHARDED = ("policy", "optimizer", "gradients", "reference", "critic", "critic_optimizer", "teacher")


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Peak memory of a phase, in bytes."""

    parts: dict[str, float]  #: components, `cache`, `work` (activations and the like) and `process`

    @property
    def total(self) -> float:
        return sum(self.parts.values())


MemoryByPhase = dict[str, PhaseMemory]


@dataclass(frozen=True)
class StepTokens:
    """Tokens that are assumed of a step."""

    longest: int  #: of a sequence
    step: float  #: of all rows of the trainer

    @classmethod
    def at_most(cls, stage: StageConfig, context: int | None) -> Self:
        """Those of a step whose completions are as long as they may be, and whose conversations have a few turns."""
        rollout, alone = stage.rollout, all(each.single_turn for each in stage.workflows)
        longest = (PROMPT_TOKENS + rollout.max_new_tokens) * (1 if alone else _TURNS)
        longest = longest if context is None else min(longest, context)
        completions = rollout.group_size if stage.algorithm.uses_rollouts else 1
        return cls(longest, stage.groups_per_step * completions * float(longest))


@dataclass(frozen=True)
class StageModel:
    """A stage with plain values in its trainer, and its policy, which may be on the meta device.

    Args:
        device: cpu or cuda.
        explorers: the stage as each explorer sees it that shares the device from another process; None: there are none.
    """

    stage: StageConfig
    model: Any
    device: str
    precision: str
    tokens: StepTokens
    explorers: Sequence[StageConfig] | None = None

    @cached_property
    def _sizes(self) -> PolicySizes:
        return PolicySizes.of(self.model)

    @property
    def _rows(self) -> int:
        """Completions that are decoded at the same time."""
        rollout = self.stage.rollout
        if not self.stage.algorithm.uses_rollouts:  # they are those of evaluations
            return rollout.max_sequences
        started = self.stage.groups_per_step * rollout.group_size * (1 + self.stage.max_staleness)
        return min(started, rollout.max_sequences)

    def cache(self) -> float:
        """Bytes of the keys and values of all completions at a time, as long as they may be."""
        if "rollout" not in stage_phases(self.stage):
            return 0.0
        return float(self._rows * self.tokens.longest * self._sizes.cache_bytes(self.precision))

    def memory(self, cache: float | None = None) -> tuple[MemoryByPhase, MemoryByPhase]:
        """Memory of each phase, without offloading and with everything offloaded that the phase does not need.

        Args:
            cache: bytes of the native engine's keys and values; None: as many as the completions need.
        """
        stage, sizes = self.stage, self.components()
        needs = component_phases(stage, elsewhere=self.explorers is not None) | {"gradients": frozenset({"train"})}
        if "cache" in sizes:
            wanted = self.cache()
            sizes["cache"] = (wanted if cache is None else min(wanted, cache)) + self._kept_turns()
        everything: MemoryByPhase = {}
        least: MemoryByPhase = {}
        for phase in stage_phases(stage):
            here = {name: size for name, size in sizes.items() if name != "gradients" or phase == "train"}
            if getattr(stage.engine, "sleep", False) and phase != "rollout":
                here.pop("engine", None)
            always = {"work": self._work(phase, sizes), "process": float(PROCESS_BYTES)}
            everything[phase] = _phase(here | always)
            least[phase] = _phase({name: size for name, size in here.items() if phase in needs.get(name, ())} | always)
        return everything, least

    def held_with_cache(self) -> float:
        """Bytes, at most, of the phases in which the engine holds its cache, besides it."""
        everything, least = self.memory(0.0)
        if self.stage.offload is None and not getattr(self.stage.engine, "sleep", False):
            return max(each.total for each in everything.values())
        return (everything if self.stage.offload is None else least)["rollout"].total

    def explorer_bytes(self) -> float:
        """Bytes of an explorer with a GPU of its own, besides its cache."""
        return self.components()["engine"] + WORK_BYTES + PROCESS_BYTES

    def components(self) -> dict[str, float]:
        """Bytes of the components in this process, and of the engine beside it; of shards those of the first rank."""
        trainer = self.stage.trainer
        policy: Any = PolicyModel(self.model, None, frozenset(), 0, 0, torch.device(self.device))
        found = estimate_component_sizes(self.stage, policy, self.precision, self.explorers)
        sizes = {name: float(size) for name, size in found.items()}
        if not trainer.shards_weights:
            return sizes
        sizes |= {name: size / trainer.ranks for name, size in sizes.items() if name in _SHARDED}
        if "cache" in sizes:  # an engine in the first rank's process has a copy of its own
            sizes["cast"] = float((2 if self.precision == "bf16" else 4) * count_weights(self.model))
        return sizes

    def _kept_turns(self) -> float:
        """Bytes of the keys and values of finished turns, which the native engine keeps for the next ones."""
        stage = self.stage
        kept_gb = getattr(stage.engine, "prefix_cache_gb", 0.0)
        if all(each.single_turn for each in stage.workflows):
            return 0.0
        most = stage.groups_per_step * stage.rollout.group_size / self._rows * self.cache()
        return min(kept_gb * 2**30, most)

    def _work(self, phase: Phase, sizes: dict[str, float]) -> float:
        """Bytes of what a phase computes with and then frees, at its peak."""
        stage, policy, trainer, on_cpu = self.stage, self._sizes, self.stage.trainer, self.device == "cpu"
        if phase == "rollout" and "engine" in sizes:
            return 0.0 if on_cpu or self.explorers is not None else float(WORK_BYTES)
        if phase == "rollout":
            read = stage.rollout.prefill_tokens + self._rows
            passing = 0.0 if on_cpu else forward_work(policy, trainer, self.precision, read)
            return _SAMPLED_LOGIT * self._rows * policy.vocabulary + passing
        step = self.tokens.step / (trainer.ranks if trainer.ranks > 1 and not on_cpu else 1)
        limit = trainer.micro_batch_tokens
        limit = min(limit, CPU_ROW) if on_cpu else max(limit, self.tokens.longest)
        first = min(step, limit)
        if phase == "inference":
            return 0.0 if on_cpu else forward_work(policy, trainer, self.precision, first)
        shards = trainer.ranks if trainer.shards_weights else 1
        sums = gradient_sums(self.model, self.precision) if on_cpu else 0.0

        def beside(tokens: float, *, several: bool) -> float:
            work = training_work(policy, trainer, self.precision, tokens, on_cpu=on_cpu, shards=shards)
            return work.beside(sizes["gradients"] - sums * (not several), several=several) + sums * several

        second = min(step - first, limit)
        return max(beside(first, several=False), beside(second, several=True) if second > 0 else 0.0)


def _phase(parts: dict[str, float]) -> PhaseMemory:
    return PhaseMemory({name: size for name, size in parts.items() if size > 0})


def too_large(stage: StageConfig, phases: MemoryByPhase, least: MemoryByPhase, limit: float) -> Iterator[str]:
    """Yields a sentence for each phase that takes more than `limit` bytes, with the keys that would reduce it.

    Args:
        phases: memory as configured.
        least: memory with everything offloaded that a phase does not need.
    """
    for phase, memory in phases.items():
        if memory.total <= limit:
            continue
        remedies = list(_remedies(stage, phase, memory, least[phase], limit))
        yield (
            f"stage {stage.name}: phase `{phase}` takes {memory.total / GB:.3g} GB of {limit / GB:.3g} GB "
            f"({_largest(memory)}): {'; or '.join(remedies)}"
        )


def _remedies(stage: StageConfig, phase: str, memory: PhaseMemory, least: PhaseMemory, limit: float) -> Iterator[str]:
    honoured = ("offload",) not in unused_offload_keys(stage)
    if stage.offload is None and honoured and least.total <= limit:
        yield f"offload: {{budget_gb: {limit / GB:.3g}}} leaves {least.total / GB:.3g} GB"
    over = memory.total - limit
    if phase == "rollout" and memory.parts.get("cache", 0.0) + memory.parts.get("work", 0.0) > over:
        yield f"lower rollout.max_sequences ({stage.rollout.max_sequences}) or rollout.max_new_tokens"
    if phase != "rollout" and memory.parts.get("work", 0.0) > over:
        checkpointing = "" if stage.trainer.gradient_checkpointing else ", or set trainer.gradient_checkpointing"
        yield f"lower trainer.micro_batch_tokens ({stage.trainer.micro_batch_tokens}){checkpointing}"
    if phase == "train" and stage.trainer.sharding == "none":
        yield "trainer.sharding: fsdp with more trainer.ranks, each on a device of its own"
    yield "a smaller model, or model.lora"


def _largest(memory: PhaseMemory) -> str:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name.replace('_', ' ')} {size / GB:.3g}" for name, size in parts)
