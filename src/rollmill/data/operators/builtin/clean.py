"""Normalises texts: HTML entities, Unicode, control characters and white space."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Literal, cast

import regex
from pydantic import Field

from rollmill.config.task_operators import TaskOperatorSection
from rollmill.data.operators.batch import TaskBatch
from rollmill.types import Message, Task

_UNSEEN = "\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"
"""Soft hyphens, zero-width spaces, direction marks. Joiners stay, because some scripts need them."""
_CONTROL = regex.compile(rf"[\p{{Cc}}--[\n\r\t\f\v\x85]]|[{_UNSEEN}]", regex.V1)
_LINE_END = regex.compile("\r\n|[\r\f\v\x85\u2028\u2029]")
_SPACE = regex.compile(r"[\p{Zs}--[ ]]", regex.V1)
_AT_LINE_END = regex.compile(r"[ \t]+(?=\n|\Z)")
_RUN, _AROUND_LINES, _BLANK = regex.compile(r"[ \t]+"), regex.compile(r" ?\n ?"), regex.compile(r"\n{3,}")

TextField = Literal["prompt", "answer", "response", "rejected"]
Change = tuple[str, Callable[[str], str]]


class CleanTasks(TaskOperatorSection):
    """Normalises texts. Drops tasks whose prompt is empty afterwards."""

    name: Literal["clean"] = "clean"
    fields: list[TextField] = Field(["prompt", "answer", "response", "rejected"], min_length=1)
    """Fields to clean; answers that are not text are left unchanged."""
    unicode: Literal["NFC", "NFKC"] | None = "NFC"
    """Unicode normal form. NFKC also replaces full-width letters, ligatures and superscripts (x² becomes x2)."""
    control: bool = True
    """Remove control characters, zero-width spaces, soft hyphens and marks of writing direction."""
    whitespace: Literal["lines", "all"] | None = "lines"
    """`lines`: one kind of line end and of space, no trailing spaces. `all`: also no indentation, no runs of spaces or
    blank lines, and none around the text; not suitable for code."""
    html: bool = False
    """Decode HTML entities such as `&lt;`."""

    def __call__(self, batch: TaskBatch) -> None:
        """Rewrite texts, and record which rule changed them."""
        changes = self._changes()
        for task in batch.tasks:
            reasons = [why for why, change in changes if self._apply(task, change)]
            last = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
            if not last.strip():
                batch.drop(task, "empty prompt")
                continue
            for why in reasons:
                batch.change(task, why)

    def _changes(self) -> list[Change]:
        found: list[Change] = []
        if self.html:
            import html

            found.append(("HTML entities", html.unescape))
        if self.unicode is not None:
            form = self.unicode
            found.append((form, lambda text: unicodedata.normalize(form, text)))
        if self.control:
            found.append(("control characters", lambda text: _CONTROL.sub("", text)))
        if self.whitespace is not None:
            found.append(("whitespace", _in_lines if self.whitespace == "lines" else _collapsed))
        return found

    def _apply(self, task: Task, change: Callable[[str], str]) -> bool:
        """Apply a change to the task's texts; returns whether one of them changed."""
        before = [getattr(task, name) for name in self.fields]
        for name in self.fields:
            value = getattr(task, name)
            if isinstance(value, str):
                setattr(task, name, change(value))
            elif name == "prompt":
                task.prompt = [cast(Message, each | {"content": change(each["content"])}) for each in value]
        return before != [getattr(task, name) for name in self.fields]


def _in_lines(text: str) -> str:
    return _AT_LINE_END.sub("", _SPACE.sub(" ", _LINE_END.sub("\n", text)))


def _collapsed(text: str) -> str:
    return _BLANK.sub("\n\n", _AROUND_LINES.sub("\n", _RUN.sub(" ", _in_lines(text)))).strip()
