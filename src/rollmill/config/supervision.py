"""`supervise`: restarts of the process that trains, and how long it may make no progress."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.section import Section

_QUIET_S = 900.0
"""Seconds that no phase of a run is quiet for, unless a deadline of the run file is longer."""
_MARGIN, _MARGIN_S = 1.2, 60.0


class SupervisionConfig(Section):
    """The process that trains is a child of `rollmill run` and `rollmill resume`. When it is killed, stalls, runs out
    of memory, or loses a server, it is started again from its newest checkpoint. Wrong settings, errors of users' code
    and losses that are not finite end the run."""

    restarts: int = Field(3, ge=0)
    """Maximum restarts without new progress: a step beyond the furthest one gives them back. 0: the command trains in
    its own process, nothing is restarted, and nothing looks for stalls."""
    backoff_s: float = Field(2.0, ge=0, le=3600)
    """Seconds before the first restart; twice as long before each further one without new progress, at most 300."""
    stall_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Seconds without a token, a verdict, a micro-batch or a step after which the run counts as stalled: the stacks of
    its threads are written to RUN/stall-N.txt, and it is started again. `auto`: 900, or more if a deadline or time
    limit of the run file is longer."""

    def stall_limit(self, stages: Iterable[Section]) -> float:
        """Returns `stall_s`, with `auto` replaced by seconds that exceed every deadline of the stages."""
        if self.stall_s != "auto":
            return self.stall_s
        limits = [
            value
            for stage in stages
            for _, section in stage.walk()
            for key in type(section).model_fields
            if key.endswith(("deadline_s", "time_limit_s")) and (value := getattr(section, key)) is not None
        ]
        return max(_QUIET_S, _MARGIN * max(limits, default=0.0) + _MARGIN_S)
