"""Running out of memory: smaller settings for the next attempt.

Smaller micro-batches change nothing but rounding: all of an optimizer step have the same denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollmill.config.loader import LoadedRun
from rollmill.config.run import StageConfig

_GENERATES = ("roll out", "evaluate")
"""Activities of the heartbeat in which the engine needs the memory."""


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
            before, after = stage.trainer.settled(), smaller.trainer.settled()
            pairs = (
                ("trainer.micro_batch_tokens", before.micro_batch_tokens, after.micro_batch_tokens),
                ("rollout.max_sequences", stage.rollout.max_sequences, smaller.rollout.max_sequences),
            )
            changes += [f"{key} {new} instead of {old}" for key, old, new in pairs if new != old]
        return replace(loaded, stages=stages), list(dict.fromkeys(changes))

    def _of_stage(self, stage: StageConfig) -> StageConfig:
        trainer, rollout = stage.trainer, stage.rollout
        if self.micro_batches:
            tokens = max(1, trainer.settled().micro_batch_tokens >> self.micro_batches)
            trainer = trainer.model_copy(update={"micro_batch_tokens": tokens})
        if self.sequences:
            most = min(rollout.max_sequences, rollout.batch * rollout.group_size)
            rollout = rollout.model_copy(update={"max_sequences": max(1, most >> self.sequences)})
        return stage.model_copy(update={"trainer": trainer, "rollout": rollout})
