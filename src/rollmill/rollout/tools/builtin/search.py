"""Tool that searches local documents for passages by keywords."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from rollmill.config.tools import ToolSection
from rollmill.errors import ConfigError
from rollmill.files import describe_json_error, parse_strict_json, read_text
from rollmill.rewards.text.parsing import split_words

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from rollmill.rollout.tools.pool import ToolFactory, ToolPool
    from rollmill.rollout.tools.toolbox import Tool
    from rollmill.rollout.workflow import Rollout

_SUFFIXES = (".txt", ".md")


class SearchTool(ToolSection):
    """Keyword search over local documents (BM25; extra `search`)."""

    needs_extra = ("search", "bm25s")
    name: Literal["search"] = "search"
    path: Path
    """A .jsonl file whose rows have `text` and optionally `title`, or a folder of .txt and .md files."""
    top_k: int = Field(3, ge=1)
    """Number of passages to return."""
    passage_words: int = Field(200, ge=10)
    """Maximum passage length in words. Longer documents are split, between paragraphs where possible."""
    _open: ToolFactory = PrivateAttr()

    def setup(self, pool: ToolPool) -> None:
        """Make the index of the documents. Raises ConfigError if a library is missing, or for bad files."""
        from rollmill.rollout.tools.function_tool import FunctionTool

        options = {"index": BM25Index(self.path, self.passage_words), "top_k": self.top_k}
        self._open = pool.in_threads(self, FunctionTool(search), options)

    def open(self, rollout: Rollout, stack: AsyncExitStack) -> Tool | Sequence[Tool]:
        return self._open(rollout, stack)


def search(query: str, *, index: BM25Index, top_k: int) -> str:
    """Search the documents for passages about the words of a query.

    Args:
        query: words to look for.
    """
    found = index.find(query, top_k)
    if not found:
        return "nothing was found"
    return "\n\n".join(
        f"[{number}] {each.title}\n{each.text}" if each.title else f"[{number}] {each.text}"
        for number, each in enumerate(found, 1)
    )


@dataclass(frozen=True, slots=True)
class DocumentPassage:
    """A passage of a document."""

    title: str
    text: str


class BM25Index:
    """Passages ranked by BM25 (Robertson and Zaragoza 2009, https://doi.org/10.1561/1500000019; Lucene's variant).

    Raises ConfigError if the documents are missing, empty or unreadable.
    """

    def __init__(self, path: Path, passage_words: int) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ConfigError(
                "the tool `search` needs the library bm25s; install it: pip install 'rollmill[search]'"
            ) from error
        documents = list(_documents(path))
        self.passages = [
            DocumentPassage(title, text) for title, whole in documents for text in split_passages(whole, passage_words)
        ]
        if not self.passages:
            raise ConfigError(
                f"tools: {path} holds no text; give a .jsonl file with `text`, or a folder of .txt or .md"
            )
        self._ranking = bm25s.BM25(method="lucene")
        self._ranking.index([_terms(f"{each.title} {each.text}") for each in self.passages], show_progress=False)

    def find(self, query: str, top_k: int) -> list[DocumentPassage]:
        """The best passages that contain a word of the query; among equals the first."""
        terms = [term for term in dict.fromkeys(_terms(query)) if term in self._ranking.vocab_dict]
        if not terms:
            return []
        scores = self._ranking.get_scores(terms)
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [self.passages[number] for number in best if scores[number] > 0]


def split_passages(text: str, most_words: int) -> list[str]:
    """Split a text into passages of whole paragraphs; longer paragraphs are cut between words."""
    passages: list[str] = []
    room = 0
    for paragraph in (each.strip() for each in text.split("\n\n")):
        count = len(paragraph.split())
        if count > most_words:
            pieces = paragraph.split()
            passages += [" ".join(pieces[at : at + most_words]) for at in range(0, count, most_words)]
            room = 0
        elif count and count <= room:
            passages[-1] += f"\n\n{paragraph}"
            room -= count
        elif count:
            passages.append(paragraph)
            room = most_words - count
    return passages


def _terms(text: str) -> list[str]:
    return [each for each in split_words(text.casefold()) if any(map(str.isalnum, each))]


def _documents(path: Path) -> Iterator[tuple[str, str]]:
    """Yield title and text of each document."""
    if path.is_dir():
        for file in sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES and each.is_file()):
            yield file.relative_to(path).with_suffix("").as_posix(), _read(file)
    elif path.suffix == ".jsonl" and path.is_file():
        for number, line in enumerate(_read(path).split("\n"), 1):
            if line.strip():
                yield _row(line, f"{path}:{number}")
    else:
        raise ConfigError(f"tools: {path} is neither a .jsonl file nor a folder of .txt and .md files")


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except ConfigError as error:
        raise ConfigError(f"tools: {error}") from error


def _row(line: str, where: str) -> tuple[str, str]:
    try:
        row = parse_strict_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {describe_json_error(error)}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ConfigError(f"{where}: expected an object with a `text`")
    return str(row.get("title") or ""), row["text"]
