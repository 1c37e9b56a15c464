"""Running out of memory: evidence of the kernel's killer, and smaller settings for the next attempt.

Smaller micro-batches change nothing but rounding: all of an optimizer step have the same denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rollmill.config.loader import LoadedRun
from rollmill.config.run import StageConfig

_VMSTAT = Path("/proc/vmstat")
_CGROUPS = Path("/sys/fs/cgroup")
_GENERATES = ("roll out", "evaluate")
"""Activities of the heartbeat in which the engine needs the memory."""


def count_oom_kills() -> int:
    """Processes that the kernel has killed because memory ran out: in this control group, and on this host."""
    return _kills(_VMSTAT) + sum(map(_kills, _event_files()))


def _event_files() -> list[Path]:
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, kinds, path in groups:
        if not kinds:
            found.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in kinds.split(","):
            found.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _kills(path: Path) -> int:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill")


@dataclass(frozen=True)
class MemoryReduction:
    """Smaller settings of an attempt: how often micro-batches, and the engine's sequences, are halved."""

    micro_batches: int = 0
    sequences: int = 0

    def further(self, doing: str) -> MemoryReduction:
        """Halve what needed the memory: the engine's sequences if the run was generating, else micro-batches."""
        if doing.startswith(_GENERATES):
            return replace(self, sequences=self.sequences + 1)
        return replace(self, micro_batches=self.micro_batches + 1)

    def apply(self, loaded: LoadedRun) -> tuple[LoadedRun, list[str]]:
        """Return the run with smaller settings, and the changed keys with their values. The run file stays as it is."""
        stages, changes = [], list[str]()
        for stage in loaded.stages:
            smaller = self._of_stage(stage)
            stages.append(smaller)
            pairs = (
                ("trainer.micro_batch_tokens", stage.trainer.micro_batch_tokens, smaller.trainer.micro_batch_tokens),
                ("rollout.max_sequences", stage.rollout.max_sequences, smaller.rollout.max_sequences),
            )
            changes += [f"{key} {new} instead of {old}" for key, old, new in pairs if new != old]
        return replace(loaded, stages=stages), list(dict.fromkeys(changes))

    def _of_stage(self, stage: StageConfig) -> StageConfig:
        trainer, rollout = stage.trainer, stage.rollout
        if self.micro_batches:
            tokens = max(1, trainer.micro_batch_tokens >> self.micro_batches)
            trainer = trainer.model_copy(update={"micro_batch_tokens": tokens})
        if self.sequences:
            most = min(rollout.max_sequences, rollout.batch * rollout.group_size)
            rollout = rollout.model_copy(update={"max_sequences": max(1, most >> self.sequences)})
        return stage.model_copy(update={"trainer": trainer, "rollout": rollout})
