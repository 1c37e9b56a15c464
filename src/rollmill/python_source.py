"""Parses Python source beside other threads.

CPython 3.11 and 3.12 count the depth of a syntax tree in a variable that all threads share. Two threads that parse at
the same time (printing a traceback parses, too) can end with `SystemError: AST constructor recursion depth mismatch`,
although nothing is wrong with the text. Parsing again then succeeds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, TypeVar

Parsed = TypeVar("Parsed")
_ATTEMPTS = 100


def parse_python(text: str) -> ast.Module:
    """Parse a module. Raises SyntaxError, and ValueError for null bytes."""
    return _try_again(lambda: ast.parse(text))


def parse_expression(text: str) -> ast.expr:
    """Parse one expression. Raises SyntaxError, ValueError, MemoryError and RecursionError."""
    return _try_again(lambda: ast.parse(text, mode="eval").body)


def parse_literal(text: str) -> Any:
    """Evaluate a Python literal. Raises SyntaxError, ValueError, TypeError, MemoryError and RecursionError."""
    return _try_again(lambda: ast.literal_eval(text))


def _try_again(parse: Callable[[], Parsed]) -> Parsed:
    for _ in range(_ATTEMPTS - 1):
        try:
            return parse()
        except SystemError:
            continue
    return parse()
