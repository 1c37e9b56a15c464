"""Changes of the number of explorers while a run goes on.

RUN/scale.json     the newest request; written by `rollmill scale`
RUN/scaled.json    the run's answer to the last request that it has dealt with

The run looks for a request every second. The number in its answer is also that of a resumed run.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NoReturn, TypeVar

from rollmill.errors import CorruptFileError, RollmillError
from rollmill.files import atomic_write, read_json_object
from rollmill.trackers.event_log import SCALE, record_event

SCALE_REQUEST, SCALE_ANSWER = "scale.json", "scaled.json"
LOOK_S = 1.0
"""Seconds between two looks of a run for a request."""
_KEEP_QUIET_S = 60.0
"""Pause after a request that could not be read or answered."""
LEAVE_S = 30.0
"""Seconds for an explorer that leaves to finish its groups; others roll out again what it has not finished then."""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A request to have this number of explorers."""

    id: str  #: so that an answer to an earlier request is not taken for the one to this
    explorers: int


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """Answer of a run to a request."""

    id: str
    explorers: int  #: the number from now on, also of a resumed run
    before: int = 0  #: number of explorers before
    text: str = ""
    missing: int = 0  #: explorers that somebody else has to start
    refused: bool = False  #: nothing has changed, and `text` says why


Record = TypeVar("Record", ScaleRequest, ScaleAnswer)


def request_scale(run_dir: Path, explorers: int) -> ScaleRequest:
    """Write a request, in place of an earlier one. Raises RollmillError if the file cannot be written."""
    request = ScaleRequest(secrets.token_hex(8), explorers)
    atomic_write(run_dir / SCALE_REQUEST, (json.dumps(asdict(request)) + "\n").encode())
    return request


def read_request(run_dir: Path) -> ScaleRequest | None:
    """Read the newest request; None without one. Raises CorruptFileError."""
    path = run_dir / SCALE_REQUEST
    return _read(path, ScaleRequest) if path.is_file() else None


def read_answer(run_dir: Path) -> ScaleAnswer | None:
    """Read the last answer; None before the first. Raises CorruptFileError."""
    path = run_dir / SCALE_ANSWER
    return _read(path, ScaleAnswer) if path.is_file() else None


def _read(path: Path, kind: type[Record]) -> Record:
    """Read a file of this module. Raises CorruptFileError if it holds something else."""
    found = read_json_object(path)
    number = found.get("explorers")
    if not {"id", "explorers"} <= found.keys() <= {each.name for each in fields(kind)}:
        raise CorruptFileError(f"{path} is damaged: it has the keys {', '.join(sorted(found))}; remove it")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise CorruptFileError(f"{path} is damaged: {number!r:.80} is no number of explorers; remove it")
    return kind(**found)


def pending_request(run_dir: Path) -> ScaleRequest | None:
    """Read the newest request, unless it has been answered. Raises CorruptFileError."""
    request, answer = read_request(run_dir), read_answer(run_dir)
    return None if request is None or (answer is not None and answer.id == request.id) else request


def answer_request(run_dir: Path, answer: ScaleAnswer) -> None:
    """Record an event, and then the answer: whoever sees the answer finds the event.

    Raises RollmillError if one cannot be written.
    """
    numbers = {"before": answer.before, "explorers": answer.explorers}
    record_event(run_dir, SCALE, **numbers, text=answer.text)
    atomic_write(run_dir / SCALE_ANSWER, (json.dumps(asdict(answer)) + "\n").encode(), durable=True)


async def answer_requests(
    run_dir: Path,
    scale: Callable[[ScaleRequest], Awaitable[ScaleAnswer]],
    message: Callable[[str], None],
    failures: tuple[type[Exception], ...] = (RollmillError,),
) -> NoReturn:
    """Answer requests, one after the other, until this is cancelled.

    Args:
        scale: does what a request asks for.
        message: shows the user a message.
        failures: errors after which a request is tried again.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if (request := pending_request(run_dir)) is not None:
                answer = await scale(request)
                message(answer.text)
                answer_request(run_dir, answer)
        except failures as error:
            message(f"`rollmill scale` is not answered: {error}")
            await asyncio.sleep(_KEEP_QUIET_S)


def count_explorers(count: int) -> str:
    """Format a number of explorers: `1 explorer`, `3 explorers`."""
    return f"{count} explorer{'s' * (count != 1)}"


def describe_change(before: int, now: int) -> str:
    """Describe a change of the number of explorers."""
    return f"{count_explorers(now)}, as before" if before == now else f"scaled from {before} to {count_explorers(now)}"
