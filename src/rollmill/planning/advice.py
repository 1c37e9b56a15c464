"""What would not fit into memory, and which keys change that."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.config.checks.offload import unused_offload_keys
from rollmill.config.run import StageConfig
from rollmill.planning.memory import MemoryByPhase, PhaseMemory

GB = 1e9


def too_large(stage: StageConfig, phases: MemoryByPhase, least: MemoryByPhase, limit: float) -> Iterator[str]:
    """A sentence for each phase that takes more than `limit` bytes.

    Args:
        phases: as the run file has it.
        least: with everything moved out that a phase does not need.
    """
    for phase, memory in phases.items():
        if memory.total <= limit:
            continue
        ways = list(_ways(stage, phase, memory, least[phase], limit))
        yield (
            f"stage {stage.name}: phase `{phase}` takes {memory.total / GB:.3g} GB of {limit / GB:.3g} GB "
            f"({_largest(memory)}): {'; or '.join(ways)}"
        )


def _ways(stage: StageConfig, phase: str, memory: PhaseMemory, least: PhaseMemory, limit: float) -> Iterator[str]:
    honoured = ("residency",) not in unused_offload_keys(stage)
    if stage.residency is None and honoured and least.total <= limit:
        yield f"residency: {{budget_gb: {limit / GB:.3g}}} leaves {least.total / GB:.3g} GB"
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
