"""Functions of rewards that run in grader processes, since they evaluate a model's text or are a user's own.

Only a grader process calls them, and each imports what it needs there: such a process starts in a fifth of the time
without the sections of run files.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from rollmill_grading.errors import FunctionRaisedError
from rollmill_grading.grader_pool import WorkerFunction

SCHEMA = WorkerFunction("schema", "rollmill.rewards.worker_functions:load_schema")
REASONING_GYM = WorkerFunction("reasoning_gym", "rollmill.rewards.worker_functions:load_reasoning_gym")
PYTHON = WorkerFunction("python", "rollmill.rewards.worker_functions:load_python")
"""The setup is the path of the user's function; a payload is its arguments and its options."""


def load_schema(setup: str) -> Callable[[list[tuple[str, str]]], str]:
    """Return a function that gives a character per (schema, text): 1 valid, 0 invalid, x if the text is not JSON."""
    from rollmill.rewards.text.json_schema import validate_texts

    validate_texts([("{}", "{}")])
    return validate_texts


def load_reasoning_gym(setup: str) -> Callable[[dict[str, Any]], float | str]:
    """Return a function that gives reasoning-gym's score.

    "unscorable" if its scorer raises on this answer but not on the reference: some scorers raise on unexpected text,
    and a policy's text must not end a run.
    """
    import reasoning_gym

    logging.disable(logging.CRITICAL)

    @cache
    def dataset_of(name: str, options: bytes) -> Any:
        return reasoning_gym.create_dataset(name, **pickle.loads(options))

    def score(payload: dict[str, Any]) -> float | str:
        dataset = dataset_of(payload["name"], pickle.dumps(payload["options"]))
        try:
            return float(dataset.score_answer(payload["answer"], payload["entry"]))
        except MemoryError:
            raise
        except Exception:
            if payload["entry"]["answer"] is not None:  # some generators have a scorer but no solution
                dataset.score_answer(payload["entry"]["answer"], payload["entry"])
            return "unscorable"

    return score


def load_python(setup: str) -> Callable[[tuple[list[Any], dict[str, Any]]], Any]:
    """Return a function that gives the validated result of a user's function: values, and numbers that are logged."""
    import rollmill.types  # noqa: F401 - what the arguments are made of
    from rollmill.errors import user_code_location
    from rollmill.rewards.foreign_functions import adapt_function
    from rollmill.rewards.values import validate_result
    from rollmill.user_code import import_object

    function = adapt_function(import_object(setup))

    def call(payload: tuple[list[Any], dict[str, Any]]) -> Any:
        arguments, options = payload
        try:
            found = function(*arguments, **options)
            if inspect.isawaitable(found):
                found = asyncio.run(_awaited(found))
            return validate_result(found, in_groups=isinstance(arguments[1], list))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            place = user_code_location(error)
            full = f"{text} ({place})" if place else text
            raise FunctionRaisedError(full, traceback.format_exc()[-4000:]) from None
        except BaseException as error:
            text = f"RuntimeError: {type(error).__name__}: {error}"[:2000]
            raise FunctionRaisedError(text, traceback.format_exc()) from None

    return call


async def _awaited(found: Any) -> Any:
    return await found
