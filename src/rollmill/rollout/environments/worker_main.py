"""The program of an environment worker process, which handles one call at a time. Run by path."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import traceback
from typing import Any

from rollmill.errors import ConfigError, RollmillError
from rollmill.rollout.environments.base import Observation, make_environment, validate_observation, validate_step
from rollmill_grading.grader_worker import serve

ERROR_RAISED, ERROR_INVALID_RESULT, ERROR_CONFIG, ERROR_WORKFLOW = "raised", "wrong", "config", "workflow"
"""Kinds of errors: raised by the environment, a wrong return value, a configuration error, an error for users."""

_LONGEST = 8 << 20
"""Largest observation in bytes; replies may have twice as many."""

_live_environments: dict[int, Any] = {}
_loop = asyncio.new_event_loop()


def handle_call(kind: str, payload: Any) -> dict[str, Any]:
    """Return the reply to a call: (number of the environment, arguments)."""
    number, *arguments = payload
    try:
        return {"value": _called(kind, number, arguments)}
    except ConfigError as error:
        return {"error": str(error), "of": ERROR_CONFIG}
    except RollmillError as error:
        return {"error": str(error), "of": ERROR_WORKFLOW}
    except _InvalidResultError as error:
        return {"error": str(error), "of": ERROR_INVALID_RESULT}
    except BaseException as error:  # SystemExit, too: an environment that exits ends only its own episode
        text = f"{type(error).__name__}: {error}"[:2000]
        return {"error": text, "of": ERROR_RAISED, "traceback": traceback.format_exc()[-4000:]}


class _InvalidResultError(Exception):
    """A method returned an invalid value."""


def _called(kind: str, number: int, arguments: list[Any]) -> Any:
    if kind == "make":
        _live_environments[number] = make_environment(*arguments)
        return None
    if kind == "close":
        target = _live_environments.pop(number, None)
        return _result(target.close()) if hasattr(target, "close") else None
    target = _live_environments[number]
    found, where = _result(getattr(target, kind)(*arguments)), f"{type(target).__name__}.{kind}"
    try:
        if kind == "reset":
            return _sendable(validate_observation(found, where), where)
        step = validate_step(found, where)
        return [_sendable(step.observation, where), step.reward, step.done, dict(step.info)]
    except TypeError as error:
        raise _InvalidResultError(str(error)) from None


def _sendable(observation: Observation, where: str) -> Observation:
    """Return an observation that fits into a reply; a larger one would end the process and its other episodes.

    Raises TypeError for messages that are no JSON, ValueError for observations that are too long.
    """
    try:
        size = len(json.dumps(observation))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where} gave messages that are no JSON ({error}); give texts, numbers, lists and dicts"
        ) from None
    if size > _LONGEST:
        raise ValueError(f"{where} gave an observation of {size} bytes; at most {_LONGEST} can be sent")
    return observation


def _result(found: Any) -> Any:
    return _loop.run_until_complete(found) if inspect.isawaitable(found) else found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(handle_call)
