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
    import math_verify

    logging.disable(logging.CRITICAL)
    math_verify.parse("$1$", parsing_timeout=None)


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


def _math(payload: dict[str, Any]) -> float:
    """Return 1 if math-verify finds the answer equal to the reference. Text that it cannot parse equals nothing.

    If both are lists, each reference must equal another answer. `tolerance` is the relative difference allowed between
    two numbers.
    """
    gold, answer = payload["gold"], payload["answer"]
    golds = [_parsed(text) for text in ([gold] if isinstance(gold, str) else gold)]
    answers = [_parsed(text) for text in ([answer] if isinstance(answer, str) else answer)]
    for expressions in golds:
        match = next((i for i, other in enumerate(answers) if _any_equal(expressions, other, payload)), None)
        if match is None:
            return 0.0
        del answers[match]
    return float(not answers)


def _any_equal(gold: list[Any], answer: list[Any], payload: dict[str, Any]) -> bool:
    return any(_equal(one, other, payload.get("tolerance", 0.0)) for one in gold for other in answer)


def _parsed(text: str) -> list[Any]:
    """Parse LaTeX. Letters behind a number are variables, because units were taken off before."""
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic, Symbol  # type: ignore[import-untyped]

    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    whole = [  # plain expressions would match a part of the text
        LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)
    ]
    found = parse(f"$\\boxed{{{text}}}$", whole, fallback_mode="no_fallback", parsing_timeout=None)
    # The parser assumes that all names of a text with a lone `i` are complex, so that equal names of two texts differ.
    names = {part for each in found if isinstance(each, Basic) for part in each.atoms(Symbol)}
    alike = {name: Symbol(name.name, real=True) for name in names if name.is_real is not True}
    return [each.xreplace(alike) if alike and isinstance(each, Basic) else each for each in found]


def _equal(gold: Any, answer: Any, tolerance: float) -> bool:
    from math_verify import verify

    try:
        gold, answer = _with_imaginary_unit(gold, answer)
        if _is_undefined(gold) or _is_undefined(answer):
            return False
        same = _same_value(gold, answer, tolerance)
        if same is None:
            same = _same_equation(gold, answer)
        if same is not None:
            return same
        return bool(
            verify(
                gold, answer, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
            )
        )
    except MemoryError:
        raise
    except Exception:
        return False


def _with_imaginary_unit(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Read `i` as the imaginary unit if no other name occurs; beside others it may be an index or a current."""
    from sympy import Expr, I, Symbol

    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return gold, answer
    letter = Symbol("i", real=True)
    if gold.free_symbols | answer.free_symbols != {letter}:
        return gold, answer
    return gold.xreplace({letter: I}), answer.xreplace({letter: I})


def _same_equation(gold: Any, answer: Any) -> bool | None:
    """True if two equations are multiples of each other, False if one has no solution; None for anything else."""
    from sympy import Eq, cancel, fraction, solve, together

    if not isinstance(gold, Eq) or not isinstance(answer, Eq):
        return None
    names = gold.free_symbols
    if names != answer.free_symbols:
        return False
    one, other = (fraction(together(each.lhs - each.rhs))[0] for each in (gold, answer))
    if not one.is_zero and not other.is_zero:
        ratio = cancel(one / other)
        if not ratio.free_symbols and not ratio.is_zero:
            return True
    return None if solve(gold, names) and solve(answer, names) else False


def _is_undefined(expression: Any) -> bool:
    r"""True if a formula has no value, such as `\log_1 1` or `1/0`; sympy finds it equal to anything."""
    from sympy import Basic, Expr, nan, zoo

    if not isinstance(expression, Basic):
        return False
    if isinstance(expression, Expr) and not expression.free_symbols:
        expression = expression.doit().evalf(10)
    return bool(expression.has(nan, zoo))


def _same_value(gold: Any, answer: Any, tolerance: float) -> bool | None:
    """True if two constants agree to 30 digits, or within the tolerance; None if symbolic algebra has to decide.

    math-verify rounds to an absolute number of digits, so any two tiny constants are equal to it. Formulas with
    variables are refused here if they differ at one point, which is far faster than simplifying their difference.
    """
    from sympy import Expr, Float, Rational

    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return None
    variables = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {variable: Rational(7 + 6 * index, 5 + 4 * index) for index, variable in enumerate(variables)}
    exact = [each.xreplace({part: Rational(str(part)) for part in each.atoms(Float)}) for each in (gold, answer)]
    one, other = (each.subs(point).evalf(40) for each in exact)
    size, difference = abs(one), abs(one - other)
    if not all(each.is_Number and each.is_finite for each in (size, difference)):
        return None
    close = bool(difference <= max(tolerance, 1e-30) * size)
    return None if close and variables else close


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

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
