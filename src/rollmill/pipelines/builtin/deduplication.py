"""Operators that drop duplicate completions: exact ones, and near duplicates by MinHash and LSH of datasketch."""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from rollmill.config.operators import OperatorSection
from rollmill.errors import ConfigError
from rollmill.pipelines.batch import Batch
from rollmill.rewards.text.parsing import split_words
from rollmill.types import Experience

if TYPE_CHECKING:
    from rollmill.pipelines.pipeline import PipelineResources

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """A mapping from texts that holds at most `size` entries and evicts the least recently used one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[str, Value] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Value | None:
        """The value of a key, which becomes the most recently used; None if unknown."""
        if key not in self._entries:
            return None
        self._entries[key] = self._entries.pop(key)
        return self._entries[key]

    def peek(self, key: str) -> Value:
        """The value of a known key, without marking it as used."""
        return self._entries[key]

    def put(self, key: str, value: Value) -> list[tuple[str, Value]]:
        """Set the value of a key, which becomes the most recently used. Returns evicted entries."""
        self._entries.pop(key, None)
        self._entries[key] = value
        too_many = len(self._entries) - self._size
        return [(old, self._entries.pop(old)) for old in list(self._entries)[: max(too_many, 0)]]

    def items(self) -> list[tuple[str, Value]]:
        """All entries, least recently used first."""
        return list(self._entries.items())


class DuplicatesOperator(OperatorSection):
    """Drops completions with the text of an earlier one, ignoring white space. The first one is kept."""

    drops = True
    name: Literal["duplicates"] = "duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Scope of earlier completions: the group, the run for the same task, or the run for any task."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    memory: int = Field(10_000, ge=1)
    """Number of texts to remember; the least recently seen are dropped first. Not with `within: group`."""
    _seen: LRUCache[bool] = PrivateAttr()  # digests, not texts

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self

    @property
    def compares_completions(self) -> bool:
        return self.within == "group"

    def setup(self, resources: PipelineResources) -> None:
        self._seen = LRUCache(self.memory)

    def __call__(self, batch: Batch) -> None:
        for group in batch.groups().values():
            memory = LRUCache[bool](len(group)) if self.within == "group" else self._seen
            for experience in group:
                key = self._key(experience)
                if memory.get(key):
                    batch.drop(experience, "duplicate")
                else:
                    memory.put(key, True)

    def _key(self, experience: Experience) -> str:
        text = normalize_whitespace(experience.response, ignore_case=self.ignore_case)
        task = f"{experience.task_id}\0" if self.within == "task" else ""
        return blake2b((task + text).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The digests, least recently used first."""
        return {"seen": list(self._seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = LRUCache(self.memory)
        for key in state["seen"]:
            self._seen.put(key, True)


def normalize_whitespace(text: str, *, ignore_case: bool = False) -> str:
    """Normalise a text: Unicode NFC, single spaces for white space."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text


_SEED, _SCHEME = 1, "affine32"
_MISSES = (0.1, 0.9)
"""Weights of the LSH's false positives and false negatives; positives are compared again, negatives are not."""
_LONGEST = 200_000
"""Maximum number of characters of a text that are compared."""


class NearDuplicatesOperator(OperatorSection):
    """Drops completions whose n-grams are nearly those of an earlier one (MinHash and LSH, extra `dedup`)."""

    drops = True
    needs_extra = ("dedup", "datasketch")
    name: Literal["near_duplicates"] = "near_duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Scope of earlier completions: the group, the run for the same task, or the run for any task."""
    threshold: float = Field(0.8, gt=0, le=1)
    """Minimum estimated Jaccard similarity of the n-grams of duplicates."""
    unit: Literal["words", "characters"] = "words"
    """Unit of the n-grams. A character of Chinese, Japanese or Thai is a word, and so is a punctuation mark."""
    ngram: int = Field(3, ge=1)
    """Units per n-gram; 3 words or 5 characters are common."""
    permutations: int = Field(128, ge=16)
    """Number of hash functions; the estimate's error is about 1 / sqrt of this."""
    memory: int = Field(2_000, ge=1)
    """Number of most recent completions to remember. Not with `within: group`."""
    _bands: tuple[int, int] = PrivateAttr()
    _known: _Index = PrivateAttr()

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self

    @property
    def compares_completions(self) -> bool:
        return self.within == "group"

    def setup(self, resources: PipelineResources) -> None:
        self._bands = _bands(self.threshold, self.permutations)
        self._known = self._index(self.memory)

    def __call__(self, batch: Batch) -> None:
        for group in batch.groups().values():
            known = self._index(len(group)) if self.within == "group" else self._known
            for experience in group:
                space = experience.task_id if self.within == "task" else ""
                minhash = self._minhash(experience)
                if known.find(minhash, space, self.threshold):
                    batch.drop(experience, "near duplicate")
                else:
                    known.add(minhash, space)

    def state_dict(self) -> dict[str, Any]:
        """The signatures, oldest first."""
        return {"seen": [[space, _packed(minhash)] for space, minhash in self._known.entries()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = self._index(self.memory)
        for space, packed in state["seen"]:
            self._known.add(self._made(_unpacked(packed)), space)

    def _index(self, size: int) -> _Index:
        return _Index(_datasketch().MinHashLSH(num_perm=self.permutations, params=self._bands), size)

    def _minhash(self, experience: Experience) -> Any:
        minhash = self._made(None)
        minhash.update_batch(sorted(text_ngrams(experience.response, self.unit, self.ngram)))
        return minhash

    def _made(self, hashvalues: Any) -> Any:
        return _datasketch().MinHash(num_perm=self.permutations, seed=_SEED, scheme=_SCHEME, hashvalues=hashvalues)


class _Index:
    """The newest `size` signatures, each in the space of its task or in a common one."""

    def __init__(self, lsh: Any, size: int) -> None:
        self._lsh, self._count = lsh, 0
        self._kept: LRUCache[tuple[str, Any]] = LRUCache(size)

    def find(self, minhash: Any, space: str, threshold: float) -> bool:
        """True if there is a similar signature in the space."""
        near = [self._kept.peek(key) for key in self._lsh.query(minhash)]
        return any(where == space and minhash.jaccard(other) >= threshold for where, other in near)

    def add(self, minhash: Any, space: str) -> None:
        key = str(self._count)
        self._count += 1
        self._lsh.insert(key, minhash)
        for old, _ in self._kept.put(key, (space, minhash)):
            self._lsh.remove(old)

    def entries(self) -> list[tuple[str, Any]]:
        """Space and signature of all, oldest first."""
        return [entry for _, entry in self._kept.items()]


def text_ngrams(text: str, unit: str, n: int) -> set[bytes]:
    """The n-grams of a text; the whole text if it is shorter than one."""
    text = normalize_whitespace(text[:_LONGEST])
    units = split_words(text) if unit == "words" else list(text)
    joint = "\0" if unit == "words" else ""
    grams = (joint.join(units[start : start + n]) for start in range(max(len(units) - n, 0) + 1))
    return {gram.encode(errors="surrogatepass") for gram in grams}


def _packed(minhash: Any) -> str:
    return base64.b64encode(minhash.hashvalues.astype("<u4").tobytes()).decode()


def _unpacked(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)


@cache
def _bands(threshold: float, permutations: int) -> tuple[int, int]:
    """Bands and rows of the LSH; cached, because their computation takes longer than a group."""
    lsh = _datasketch().MinHashLSH(threshold=threshold, num_perm=permutations, weights=_MISSES)
    return lsh.b, lsh.r


def _datasketch() -> Any:
    try:
        import datasketch
    except ModuleNotFoundError as error:
        raise ConfigError("operator `near_duplicates` needs datasketch: pip install 'rollmill[dedup]'") from error
    return datasketch
