"""Normalises texts: HTML entities, Unicode, control characters and white space."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Callable
from typing import cast

import regex

from rollmill.config.task_operators import CleanTasks
from rollmill.data.operators.batch import TaskBatch
from rollmill.types import Message, Task

_UNSEEN = "\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"
"""Soft hyphens, zero-width spaces, direction marks. Joiners stay, because some scripts need them."""
_CONTROL = regex.compile(rf"[\p{{Cc}}--[\n\r\t\f\v\x85]]|[{_UNSEEN}]", regex.V1)
_LINE_END = regex.compile("\r\n|[\r\f\v\x85\u2028\u2029]")
_SPACE = regex.compile(r"[\p{Zs}--[ ]]", regex.V1)
_AT_LINE_END = regex.compile(r"[ \t]+(?=\n|\Z)")
_RUN, _AROUND_LINES, _BLANK = regex.compile(r"[ \t]+"), regex.compile(r" ?\n ?"), regex.compile(r"\n{3,}")

Change = tuple[str, Callable[[str], str]]


def clean(options: CleanTasks) -> Callable[[TaskBatch], None]:
    """Rewrites texts and records which rule changed them; drops tasks with an empty prompt."""
    changes = _changes(options)

    def apply(batch: TaskBatch) -> None:
        for task in batch.tasks:
            reasons = [why for why, change in changes if _apply(task, options, change)]
            if _empty(task):
                batch.drop(task, "empty prompt")
                continue
            for why in reasons:
                batch.change(task, why)

    return apply


def _changes(options: CleanTasks) -> list[Change]:
    found: list[Change] = []
    if options.html:
        found.append(("HTML entities", html.unescape))
    if options.unicode is not None:
        form = options.unicode
        found.append((form, lambda text: unicodedata.normalize(form, text)))
    if options.control:
        found.append(("control characters", lambda text: _CONTROL.sub("", text)))
    if options.whitespace is not None:
        found.append(("whitespace", _in_lines if options.whitespace == "lines" else _collapsed))
    return found


def _in_lines(text: str) -> str:
    return _AT_LINE_END.sub("", _SPACE.sub(" ", _LINE_END.sub("\n", text)))


def _collapsed(text: str) -> str:
    return _BLANK.sub("\n\n", _AROUND_LINES.sub("\n", _RUN.sub(" ", _in_lines(text)))).strip()


def _apply(task: Task, options: CleanTasks, change: Callable[[str], str]) -> bool:
    """Apply a change to the task's texts; returns whether one of them changed."""
    before = [getattr(task, name) for name in options.fields]
    for name in options.fields:
        value = getattr(task, name)
        if isinstance(value, str):
            setattr(task, name, change(value))
        elif name == "prompt":
            task.prompt = [cast(Message, each | {"content": change(each["content"])}) for each in value]
    return before != [getattr(task, name) for name in options.fields]


def _empty(task: Task) -> bool:
    last = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
    return not last.strip()
