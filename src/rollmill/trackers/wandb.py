"""Sends metrics and sample completions to Weights & Biases (extra `wandb`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.trackers import WandbSection
from rollmill.errors import ConfigError
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience


class WandbTracker:
    """Logs to one run of W&B, which a resumed run continues.

    The x axis is `step`, not W&B's own counter: a resumed run repeats steps, and W&B drops what its counter has passed.
    Raises ConfigError if W&B refuses the run.
    """

    def __init__(self, config: WandbSection, run: TrackedRun) -> None:
        import wandb

        key = f"wandb/{config.project}"
        known = run.service_id(key)
        try:
            self._run: Any = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags or None,
                mode=config.mode,
                id=known,
                resume=None if known is None else "allow",
                name=run.folder.resolve().name,
                config=run.settings(),
                dir=run.folder,
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True, login_timeout=30),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"monitor.trackers: W&B does not accept the run: {reason}; run `wandb login`, or use `mode: offline`"
            ) from error
        run.keep_service_id(key, self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Log the numbers of a step, and its first completions as a table."""
        row: dict[str, Any] = {"step": metrics["step"], **numbers(metrics)}
        if experiences:
            from wandb import Table

            rows = [[each.prompt, each.response, each.reward] for each in experiences]
            row["completions"] = Table(columns=["prompt", "completion", "reward"], data=rows)
        self._run.log(row)

    def close(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()
