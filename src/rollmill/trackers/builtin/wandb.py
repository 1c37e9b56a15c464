"""Sends metrics and sample completions to Weights & Biases (extra `wandb`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import PrivateAttr

from rollmill.config.trackers import ServiceTrackerSection
from rollmill.errors import ConfigError
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience


class WandbTracker(ServiceTrackerSection):
    """Weights & Biases (extra `wandb`). A resumed run continues the same run there; files are in RUN/wandb."""

    needs_extra = ("wandb", "wandb")
    name: Literal["wandb"] = "wandb"
    project: str = "rollmill"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team. Default: that of the API key."""
    group: str | None = None
    """Group of runs that it belongs to."""
    tags: list[str] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` only writes RUN/wandb, which `wandb sync` uploads later."""
    _run: Any = PrivateAttr()

    def setup(self, run: TrackedRun) -> None:
        import wandb

        key = f"wandb/{self.project}"
        known = run.service_id(key)
        try:
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                group=self.group,
                tags=self.tags or None,
                mode=self.mode,
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
        # the x axis is `step`: a resumed run repeats steps, and W&B drops what its own counter has passed
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
