"""Writes metrics and sample completions for TensorBoard (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.trackers import TrackerSection
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(TrackerSection):
    """Writes event files to RUN/tensorboard (extra `tensorboard`)."""

    needs_extra = ("tensorboard", "tensorboard")
    name: Literal["tensorboard"] = "tensorboard"
    completions: int = Field(1, ge=0)
    """Number of sample completions to write as text at every step."""
    _writer: SummaryWriter = PrivateAttr()

    def setup(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resumed_after is None else run.resumed_after + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Write the numbers of a step by their names, and its first completions as text."""
        step = metrics["step"]
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        for index, experience in enumerate(experiences[: self.completions]):
            self._writer.add_text(f"completion/{index}", _literally(experience), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _literally(experience: Experience) -> str:
    """Format as an indented block, because TensorBoard renders Markdown."""
    text = f"{experience.prompt}\n--- response, reward {experience.reward}\n{experience.response}"
    return "\n".join("    " + line for line in text.encode("utf-8", "backslashreplace").decode().splitlines())
