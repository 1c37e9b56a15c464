"""Patches of text files: unified diffs, and the form of OpenAI's tool `apply_patch` (`*** Update File: PATH`).

Hunks are found by their lines, not by line numbers, which models seldom get right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

_Kind = Literal["add", "update", "delete"]
_KINDS: dict[str, _Kind] = {"*** Update File:": "update", "*** Add File:": "add", "*** Delete File:": "delete"}
_MOVE = "*** Move to:"
_NOWHERE = "/dev/null"


class PatchError(ValueError):
    """A patch cannot be read, or does not fit a file; the message says where."""


@dataclass(slots=True)
class Hunk:
    """Lines that replace others. `at` is a line further up, after which they are looked for, if it is given."""

    at: str = ""
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FileChange:
    """The change that a patch makes to one file."""

    kind: _Kind
    path: str
    target: str  #: the new path; of a file that stays in its place, the same
    hunks: list[Hunk] = field(default_factory=list)

    def apply(self, text: str) -> str:
        """The file's text after the change. Raises PatchError naming the lines that are not in the file."""
        ends = text.endswith("\n") or not text
        lines, at = text.split("\n")[: -1 if text.endswith("\n") else None] if text else [], 0
        for hunk in self.hunks:
            at = self._replace(lines, hunk, at)
        return "\n".join(lines) + ("\n" if ends and lines else "")

    def _replace(self, lines: list[str], hunk: Hunk, at: int) -> int:
        """Replace the lines of a hunk, at or after line `at`; return the line behind them."""
        if hunk.at and (found := _find(lines, [hunk.at], at)) is not None:
            at = found + 1
        if not hunk.old:  # only new lines: behind the line that was named, else at the end
            place = at if hunk.at else len(lines)
        else:
            place = next((each for start in (at, 0) if (each := _find(lines, hunk.old, start)) is not None), -1)
            if place < 0:
                shown = "\n".join(hunk.old[:10])
                raise PatchError(f"{self.path}: these lines are not in the file as they are in the patch:\n{shown}")
        lines[place : place + len(hunk.old)] = hunk.new
        return place + len(hunk.new)


def parse_patch(text: str) -> list[FileChange]:
    """Read a patch of either form. Raises PatchError if there is no change in it, or a line is out of place."""
    changes: list[FileChange] = []
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    old = ""
    for number, line in enumerate(lines, 1):
        following = lines[number] if number < len(lines) else ""
        change = changes[-1] if changes else None
        if header := next((start for start in _KINDS if line.startswith(start)), None):
            path = line.removeprefix(header).strip()
            changes.append(FileChange(_KINDS[header], path, path))
        elif line.startswith(_MOVE) and change is not None and change.kind == "update":
            change.target = line.removeprefix(_MOVE).strip()
        elif line.startswith("--- ") and following.startswith("+++ "):
            old = _diff_path(line)
        elif line.startswith("+++ ") and old:
            new = _diff_path(line)
            kind: _Kind = "add" if old == _NOWHERE else "delete" if new == _NOWHERE else "update"
            changes.append(FileChange(kind, new if kind == "add" else old, old if kind == "delete" else new))
            old = ""
        elif line.startswith(("*** Begin Patch", "*** End Patch", "*** End of File", "diff --git ", "index ")):
            old = ""
        elif change is None:
            continue  # what is said in front of a patch
        elif line.startswith("@@"):
            change.hunks.append(Hunk(line.strip("@ ").strip() if "-" not in line.split("@@")[1][:3] else ""))
        elif line.startswith("\\ "):  # no newline at the end of the file
            continue
        elif line[:1] in (" ", "-", "+", ""):
            if not change.hunks:
                change.hunks.append(Hunk())
            hunk, body = change.hunks[-1], line[1:]
            hunk.old += [] if line.startswith("+") else [body]
            hunk.new += [] if line.startswith("-") else [body]
        else:
            raise PatchError(f"line {number} of the patch begins with none of ` `, `-`, `+` and `@@`: {line:.80}")
    if not changes:
        raise PatchError("the patch names no file; begin it with `*** Update File: PATH`, or with `---` and `+++`")
    for change in changes:
        if not change.hunks and change.kind == "update" and change.target == change.path:
            raise PatchError(f"{change.path}: the patch has no lines for it")
    return changes


def _diff_path(line: str) -> str:
    path = line[4:].split("\t")[0].strip()
    return path if path == _NOWHERE else path.removeprefix("a/" if line.startswith("---") else "b/")


def _find(lines: Sequence[str], wanted: Sequence[str], start: int) -> int | None:
    """First place of some lines; without any, of those that differ in the space at their ends, then in all space."""
    kept: list[Callable[[str], str]] = [str, str.rstrip, str.strip]
    for plain in kept:
        looked_for = [plain(each) for each in wanted]
        for place in range(start, len(lines) - len(wanted) + 1):
            if [plain(each) for each in lines[place : place + len(wanted)]] == looked_for:
                return place
    return None
