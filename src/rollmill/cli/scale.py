"""`rollmill scale RUN --explorers N`: change the number of explorers while a run goes on."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.printing import print_json, print_line

if TYPE_CHECKING:
    from rollmill.remote.scaling import ScaleAnswer, ScaleRequest

_LOOK_S = 0.2
_GOES_ON = ("running", "restarting", "late", "stopped")
"""States of a run that answers, or will do so later."""


def command(
    run: Annotated[Path, typer.Argument(help="Run directory of a run that goes on.")],
    explorers: Annotated[int, typer.Option("--explorers", min=1, help="Number of explorers from now on.")],
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait until the run says that it is done.")
    ] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Change the number of explorers of a run on Ray, or with `mode: train`, while it goes on."""
    from rollmill.config.yaml_file import read_plain_yaml
    from rollmill.errors import ConfigError, RollmillError
    from rollmill.remote.scaling import request_scale
    from rollmill.trackers.heartbeat import CONFIG, read_status

    state = read_status(run).state
    _require_explorers(run, read_plain_yaml(run / CONFIG))
    if not _goes_on(run, state):
        raise ConfigError(
            f"{run} does not go on: it is {state}; continue it by `rollmill resume {run}`, and scale it then"
        )
    answer = _wait_for_answer(run, request_scale(run, explorers), wait)
    if as_json:
        print_json({"run": str(run), **asdict(answer)})
    elif not answer.refused and not answer.missing:
        print_line(answer.text)
    if answer.refused or answer.missing:
        raise RollmillError(answer.text)


def _goes_on(run: Path, state: str) -> bool:
    """True if the run is in progress; while it is resumed, its processes have not reported yet."""
    from rollmill.supervision.run_lock import is_run_locked, will_restart

    return state in _GOES_ON or is_run_locked(run) or (state == "killed" and will_restart(run))


def _require_explorers(run: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError unless the run has explorers in other processes."""
    from rollmill.errors import ConfigError

    placement = config.get("placement") or {}
    if config.get("mode") != "train" and placement.get("name") != "ray":
        text = f"{run} rolls out in the process that trains, so it has no number of explorers"
        raise ConfigError(f"{text}; runs with `placement: ray` or `mode: train` have one")


def _wait_for_answer(run: Path, request: ScaleRequest, wait_s: float) -> ScaleAnswer:
    """Return the run's answer. Raises RollmillError if there is none in time, or will be none."""
    from rollmill.errors import RollmillError
    from rollmill.remote.scaling import read_answer, read_request
    from rollmill.trackers.heartbeat import read_status

    ends = time.monotonic() + wait_s
    while True:
        if (answer := read_answer(run)) is not None and answer.id == request.id:
            return answer
        if (newest := read_request(run)) is None or newest.id != request.id:
            raise RollmillError(f"{run}: another `rollmill scale` has taken the place of this one")
        if not _goes_on(run, state := read_status(run).state):
            raise RollmillError(f"{run} ended before it was scaled: it is {state}")
        if time.monotonic() > ends:
            text = f"{run} has not answered within {wait_s:g} s (--wait); it does so as soon as it can"
            raise RollmillError(f"{text}: `rollmill status {run}` shows it")
        time.sleep(_LOOK_S)
