"""Texts for a terminal: metrics, durations, progress, and output that no run depends on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, TextIO

from rollmill.trackers.metrics_log import Metric, Metrics

# Control characters (a completion may hold terminal escape codes), text-direction overrides and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape everything in `text` that could control a terminal, such as `\\x1b`. Line breaks and tabs stay."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: str, width: int) -> str:
    """Put `text` on one line, with line breaks as `\\n`, truncated to `width` characters."""
    flat = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return flat if len(flat) <= width else flat[: max(0, width - 3)] + "..."


Stages = Sequence[tuple[str, int]]

_RECENT = 20


class RunProgress:
    """Tracks stage, step and remaining time. Steps count over all stages; a stage may end before its planned steps."""

    def __init__(self, stages: Stages) -> None:
        self.stages = list(stages)
        self.index = 0  #: index of the stage
        self.begun_at = 0  #: steps made before this stage
        self.step = 0
        self._recent: list[float] = []

    def update(self, metrics: Metrics) -> None:
        """Update from the metrics of a step or of an evaluation."""
        step = metrics["step"]
        assert isinstance(step, int)
        while self.index + 1 < len(self.stages) and self._left_stage(step, metrics.get("stage")):
            self.begun_at = min(self.step, self.begun_at + self.stages[self.index][1])
            self.index += 1
            self._recent.clear()
        self.step = max(self.step, step)
        seconds = metrics.get("seconds/total")
        if isinstance(seconds, float | int):
            self._recent = [*self._recent[1 - _RECENT :], float(seconds)]

    @property
    def stage(self) -> str:
        """Name of the current stage."""
        return self.stages[self.index][0] if self.stages else ""

    @property
    def total(self) -> int:
        """Steps of the whole run; stages that ended early count with their actual steps."""
        return max(self.step, self.begun_at + sum(steps for _, steps in self.stages[self.index :]))

    @property
    def stage_step(self) -> int:
        """Steps made in this stage."""
        return self.step - self.begun_at

    @property
    def stage_total(self) -> int:
        """Steps planned for this stage."""
        return max(self.stage_step, self.stages[self.index][1] if self.stages else 0)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the stage ends, from the mean of its recent steps; None before its first step."""
        if not self._recent:
            return None
        return (self.stage_total - self.stage_step) * sum(self._recent) / len(self._recent)

    def _left_stage(self, step: int, stage: object) -> bool:
        name, steps = self.stages[self.index]
        later = [other for other, _ in self.stages[self.index + 1 :]]
        return step > self.begun_at + steps or (stage != name and stage in later)


_LEADING = {"reward/mean": "reward", "pairs/accuracy": "accuracy"}
_FURTHER = {"length/mean": "length", "entropy": "entropy", "kl": "kl", "grad_norm": "grad_norm"}


def shown_metrics(metrics: Metrics) -> tuple[dict[str, str], dict[str, str]]:
    """Return the metrics of a step's line with their short names: those that lead it, and the others.

    The loss leads only where there is neither a reward nor an accuracy: in policy-gradient training it says little.
    """
    leading = {key: name for key, name in _LEADING.items() if key in metrics}
    others = {key: name for key, name in _FURTHER.items() if key in metrics}
    loss = {"loss": "loss"} if "loss" in metrics else {}
    return (leading, others | loss) if leading else (loss, others)


def print_or_drop(text: str, stream: TextIO) -> str:
    """Print a line of a run, which does not depend on its output; returns why it could not, or an empty text.

    What does not fit on a full disk is dropped, and everything once the program that read a pipe has ended.
    """
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:  # such as `rollmill run ... | head -3`
        drop_output(stream)
        return "the program that read the output has ended"
    except OSError as error:
        return f"the output cannot be written: {error.strerror}"
    return ""


def drop_output(stream: TextIO) -> None:
    """Drop what else this process prints to a stream, and what Python flushes at the end."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


class DroppingOutput:
    """Stream that drops what it cannot write, such as to a terminal that was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop this and what follows."""
        try:
            return self._stream.write(text)
        except OSError:  # a run does not depend on who looks at it
            drop_output(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what is left and what follows."""
        try:
            self._stream.flush()
        except OSError:
            drop_output(self._stream)


def format_metric(value: Metric) -> str:
    """Format a metric briefly; `nan` if it is missing."""
    if value is None:
        return "nan"
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.3f}" if value == 0 or 0.0995 <= abs(value) < 1000 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format a duration: 0.31 s, 8.3 s, 2 min 05 s, 1 h 12 min."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
