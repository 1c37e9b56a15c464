"""The program of a grader process. It grades one answer at a time; the parent can kill it, unlike a thread.

It is run by path and never imported by the parent. It imports the standard library, and a grading library or a user's
file with the first `load` request. Frames are a 4-byte big-endian length and a body: pickle towards this process, JSON
back, because output of a process that evaluates a model's text is not trusted.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import logging
import os
import pickle
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1


def main() -> None:
    memory_bytes = int(sys.argv[2])
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    serve(_handle_request)


def serve(handle: Callable[[str, Any], dict[str, Any]]) -> None:
    """Handle the parent's requests until it closes the pipe or ends. The first argument is the parent's process id."""
    _die_with(int(sys.argv[1]))
    requests, replies = _take_pipes()
    while len(header := requests.read(4)) == 4:
        kind, payload = pickle.loads(requests.read(struct.unpack("!I", header)[0]))
        body = json.dumps(handle(kind, payload)).encode()
        replies.write(struct.pack("!I", len(body)) + body)
        replies.flush()


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the two pipes, out of reach of code that prints or reads standard input. Printed text goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def _handle_request(kind: str, payload: Any) -> dict[str, Any]:
    try:
        if kind == "load":
            LOADERS[payload[0]](payload[1])
            return {"value": 1.0}
        if kind == "python":
            return _python(*payload)
        return {"value": HANDLERS[kind](payload[1])}
    except MemoryError:
        return {"outcome": "memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


# Loaders import libraries up front, so that no graded answer pays for the import.


def _load_math(setup: str) -> None:
    from rollmill.rewards.answers.algebra import compare_formulas, compare_quickly, warm_up
    from rollmill.rewards.answers.pristine import PristineProcess

    logging.disable(logging.CRITICAL)
    pristine["math"] = PristineProcess(compare_formulas, warm_up)
    compare_quickly(["1"], ["1"])


def _load_schema(setup: str) -> None:
    from rollmill.rewards.text.json_schema import validate_texts

    validate_texts([("{}", "{}")])


def _load_reasoning_gym(setup: str) -> None:
    import reasoning_gym  # noqa: F401

    logging.disable(logging.CRITICAL)


def _load_python(setup: str) -> None:
    import rollmill.rewards.values
    import rollmill.types  # noqa: F401 - what the arguments are made of
    from rollmill.rewards.foreign_functions import adapt_function
    from rollmill.user_code import import_object

    functions[setup] = adapt_function(import_object(setup))


def _python(setup: str, payload: tuple[list[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return the validated result of a user's function for these arguments: values, and numbers that are logged."""
    from rollmill.errors import user_code_location
    from rollmill.rewards.values import validate_result

    arguments, options = payload
    function = functions[setup]
    try:
        found = function(*arguments, **options)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return {"value": validate_result(found, in_groups=isinstance(arguments[1], list))}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:2000]
        place = user_code_location(error)
        return {"error": f"{text} ({place})" if place else text, "traceback": traceback.format_exc()[-4000:]}
    except BaseException as error:
        return {"error": f"RuntimeError: {type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()}


async def _awaited(found: Any) -> Any:
    return await found


def _math(payload: dict[str, Any]) -> float | str:
    """Return 1 if each reference equals another answer, else 0; "too_costly" if that takes too many steps."""
    from rollmill.rewards.answers.algebra import compare_quickly

    texts = ([text] if isinstance(text := payload[key], str) else text for key in ("gold", "answer"))
    arguments = (*texts, payload.get("tolerance", 0.0))
    found = compare_quickly(*arguments)
    if found is not None:
        return found
    counted: float | str = pristine["math"].call(*arguments)
    return counted


def _schema(payload: list[tuple[str, str]]) -> str:
    """Return a character for each (schema, text): 1 valid, 0 invalid, x if the text is not JSON."""
    from rollmill.rewards.text.json_schema import validate_texts

    return validate_texts(payload)


def _reasoning_gym(payload: dict[str, Any]) -> float | str:
    """Return reasoning-gym's score; "unscorable" if its scorer raises on this answer but not on the reference.

    Some scorers raise on unexpected text, and a policy's text must not end a run.
    """
    dataset = _dataset(payload["name"], pickle.dumps(payload["options"]))
    try:
        return float(dataset.score_answer(payload["answer"], payload["entry"]))
    except MemoryError:
        raise
    except Exception:
        if payload["entry"]["answer"] is not None:  # some generators have a scorer but no solution
            dataset.score_answer(payload["entry"]["answer"], payload["entry"])
        return "unscorable"


@cache
def _dataset(name: str, options: bytes) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **pickle.loads(options))


HANDLERS: dict[str, Callable[[Any], float | str]] = {
    "math": _math,
    "schema": _schema,
    "reasoning_gym": _reasoning_gym,
}
LOADERS: dict[str, Callable[[str], None]] = {
    "math": _load_math,
    "schema": _load_schema,
    "reasoning_gym": _load_reasoning_gym,
    "python": _load_python,
}
functions: dict[str, Callable[..., Any]] = {}
pristine: dict[str, Any] = {}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
