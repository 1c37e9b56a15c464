"""What is said when a training step cannot go on."""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.errors import TrainingError


def failed_step_error(step: int, what: str, task_ids: Iterable[str]) -> TrainingError:
    """The error of an update that was not made, naming the tasks it was about."""
    tasks = sorted(set(task_ids))
    shown = ", ".join(tasks[:8]) + (f" and {len(tasks) - 8} more" if len(tasks) > 8 else "")
    return TrainingError(
        f"training step {step}: {what}, in a micro-batch with tasks {shown}. No weight was changed by this "
        "update. Lower trainer.lr, use trainer.precision: fp32, or look at the rewards of these tasks."
    )
