"""Fenced blocks of the documents, and the commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_NAME = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")


@dataclass
class Block:
    """A fenced block: its kind, its text and where it begins."""

    kind: str
    text: str
    place: str


@dataclass
class Command:
    """A command line, and the output that the document shows below it ("..." stands for anything)."""

    line: str
    place: str
    output: list[str] = field(default_factory=list)


def blocks(document: Path, *kinds: str) -> list[Block]:
    """The blocks of these kinds, in order."""
    text = document.read_text(encoding="utf-8")
    name = document.relative_to(ROOT)
    return [
        Block(found[1], found[2], f"{name}:{text.count(chr(10), 0, found.start()) + 1}")
        for found in _BLOCK.finditer(text)
        if found[1] in kinds
    ]


def files(document: Path) -> dict[str, str]:
    """Name -> text of the blocks whose first line is a comment with nothing but a file's name."""
    named = [(_NAME.match(block.text), block.text) for block in blocks(document, "python", "yaml")]
    return {found[1]: text for found, text in named if found is not None}


def commands(document: Path) -> list[Command]:
    """Every line of `bash` blocks, and every line behind `$ ` of `console` blocks."""
    found: list[Command] = []
    for block in blocks(document, "bash", "console"):
        for line in block.text.splitlines():
            if block.kind == "bash" or line.startswith("$ "):
                found.append(Command(line.removeprefix("$ "), block.place))
            else:
                found[-1].output.append(line)
    return found
