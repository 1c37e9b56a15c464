"""The function of worker processes that hold environments; it handles one call at a time."""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable
from typing import Any

from rollmill.errors import ConfigError, RollmillError
from rollmill.rollout.environments.base import Observation, make_environment, validate_observation, validate_step
from rollmill_grading.worker_process import WorkerFunction

ENVIRONMENTS = WorkerFunction("environment", "rollmill.rollout.environments.worker_functions:load_environments")
"""A payload is the kind of call, the number of the environment, and arguments."""
ERROR_RAISED, ERROR_INVALID_RESULT, ERROR_CONFIG, ERROR_WORKFLOW = "raised", "wrong", "config", "workflow"
"""Kinds of errors: raised by the environment, a wrong return value, a configuration error, an error for users."""

_LONGEST = 8 << 20
"""Largest observation in bytes; replies may have twice as many."""


def load_environments(setup: str) -> Callable[[tuple[Any, ...]], dict[str, Any]]:
    """Return the function that handles calls; environments live in it, by their numbers."""
    live: dict[int, Any] = {}
    loop = asyncio.new_event_loop()

    def result(found: Any) -> Any:
        return loop.run_until_complete(found) if inspect.isawaitable(found) else found

    def called(kind: str, number: int, arguments: list[Any]) -> Any:
        if kind == "make":
            live[number] = make_environment(*arguments)
            return None
        if kind == "close":
            target = live.pop(number, None)
            return result(target.close()) if hasattr(target, "close") else None
        target = live[number]
        found, where = result(getattr(target, kind)(*arguments)), f"{type(target).__name__}.{kind}"
        try:
            if kind == "reset":
                return _sendable(validate_observation(found, where), where)
            step = validate_step(found, where)
            return [_sendable(step.observation, where), step.reward, step.done, dict(step.info)]
        except TypeError as error:
            raise _InvalidResultError(str(error)) from None

    def handle(payload: tuple[Any, ...]) -> dict[str, Any]:
        kind, number, *arguments = payload
        try:
            return {"value": called(kind, number, arguments)}
        except ConfigError as error:
            return {"error": str(error), "of": ERROR_CONFIG}
        except RollmillError as error:
            return {"error": str(error), "of": ERROR_WORKFLOW}
        except _InvalidResultError as error:
            return {"error": str(error), "of": ERROR_INVALID_RESULT}
        except BaseException as error:  # SystemExit, too: an environment that exits ends only its own episode
            text = f"{type(error).__name__}: {error}"[:2000]
            return {"error": text, "of": ERROR_RAISED, "traceback": traceback.format_exc()[-4000:]}

    return handle


class _InvalidResultError(Exception):
    """A method returned an invalid value."""


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
