"""Parsing where CPython's parser fails now and then, because another thread parses, too."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from rollmill.python_source import parse_expression, parse_literal, parse_python


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets every first parse fail as CPython 3.11 does; the texts that were parsed."""
    parse, texts = ast.parse, []

    def twice(text: str, *args: Any, **options: Any) -> ast.AST:
        texts.append(text)
        if len(texts) % 2:
            raise SystemError("AST constructor recursion depth mismatch (before=144, after=31)")
        return parse(text, *args, **options)

    monkeypatch.setattr(ast, "parse", twice)
    return texts


def test_a_spurious_failure_is_tried_again(failing: list[str]) -> None:
    assert ast.unparse(parse_python("x = 1")) == "x = 1"
    assert ast.unparse(parse_expression("1 + 2")) == "1 + 2"
    assert parse_literal("[1, 'a']") == [1, "a"]
    assert len(failing) == 6


@pytest.mark.parametrize("parse", [parse_python, parse_expression, parse_literal])
def test_wrong_text_is_an_error_at_once(parse: Callable[[str], Any]) -> None:
    with pytest.raises(SyntaxError):
        parse("1 +")


def test_a_failure_that_stays_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise SystemError("broken")

    monkeypatch.setattr(ast, "parse", never)
    with pytest.raises(SystemError, match="broken"):
        parse_python("1")
