"""Extracts the code of an answer."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

MAX_CODE_CHARS = 400_000
"""Characters; longer code earns 0 with the outcome `too_long`."""
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([\w.+#-]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"python", "py", "python3", "py3"}
_END = re.compile(r"\n(?=(?:class|def|#|if|print|```))")
"""The end of a function's completion: the stop words of Chen et al. 2021, arXiv:2107.03374, section 2.1."""


class CodeBlock(NamedTuple):
    """A fenced block: its language in lower case, and its lines."""

    language: str
    code: str


def find_code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks, in order. An unclosed one extends to the next fence with a language, or to the end.

    As in CommonMark, a fence indented by four or more columns relative to the first one is part of the code.
    """
    found: list[CodeBlock] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        bare = not fence[3] and fence[0].strip() == fence[2]
        if opened is None:
            opened = None if fence[2][0] in fence[0][fence.end(2) - fence.start() :] else fence
        elif fence[2].startswith(opened[2]) and (bare or fence[3]) and _column(fence) < _column(opened) + 4:
            found.append(_block(opened, text[opened.end() : fence.start()]))
            opened = None if bare else fence
    if opened is not None:
        found.append(_block(opened, text[opened.end() :]))
    return found


def extract_code(text: str, place: Literal["auto", "fence", "whole"] = "auto", name: str | None = None) -> str | None:
    """Return the code of an answer, None if there is none.

    Of the blocks marked as Python, or else those without a language, it is the last one that defines `name`, or else
    the last one.
    """
    if place != "whole":
        fenced = [block for block in find_code_blocks(text) if block.code.strip()]
        for languages in (_PYTHON, {""}):
            candidates = [block.code for block in fenced if block.language in languages]
            defining = [code for code in candidates if name is not None and defines_name(code, name)]
            if candidates:
                return (defining or candidates)[-1]
        if place == "fence":
            return None
    return text if text.strip() else None


def defines_name(code: str, name: str) -> bool:
    """True if an unindented line defines a function, class or variable `name`."""
    named = re.escape(name)
    pattern = rf"^(?:(?:async )?def|class)[ \t]+{named}\b|^{named}[ \t]*=(?!=)"
    return re.search(pattern, code, re.MULTILINE) is not None


def join_prefix(prefix: str, code: str, name: str | None) -> str:
    """Join `prefix` (the beginning of a function, such as HumanEval's prompts) and the code into a program.

    Code that defines `name` itself comes after the prefix, and may use its imports and helpers. Other code continues
    the prefix, up to the start of another definition or statement. Without a name, indented code continues the prefix,
    other code comes after it.
    """
    if name is not None and not defines_name(code, name):
        return prefix + _END.split(code, maxsplit=1)[0] + "\n"
    if name is None and code[:1].isspace():
        return prefix + code
    return f"{complete_prefix(prefix)}\n\n{code}"


def complete_prefix(prefix: str) -> str:
    """Complete the prefix to a program: a function without a body gets one."""
    if not prefix.rstrip().endswith(":"):
        return prefix
    last = prefix.rstrip().rpartition("\n")[2]
    return f"{prefix.rstrip()}\n{last[: len(last) - len(last.lstrip())]}    pass\n"


def _column(fence: re.Match[str]) -> int:
    return len(fence[1].expandtabs(4))


def _block(opened: re.Match[str], body: str) -> CodeBlock:
    lines = body.split("\n")[1:]
    return CodeBlock(opened[3].lower(), "\n".join(line.removeprefix(opened[1]) for line in lines))
