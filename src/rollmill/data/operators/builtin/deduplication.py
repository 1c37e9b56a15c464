"""Removes duplicate tasks, and training tasks that overlap with held-out ones."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

import regex
from pydantic import Field, PrivateAttr, model_validator

from rollmill.config.rows import RowsSection
from rollmill.config.task_operators import TaskOperatorSection
from rollmill.data.images import image_refs_of
from rollmill.data.operators.batch import TaskBatch, TaskReader
from rollmill.data.operators.picture_hash import PictureHash, PictureIndex, hash_picture
from rollmill.errors import ConfigError, TasksetError
from rollmill.types import Task

_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}]|[[\p{L}\p{M}\p{N}_]--[\p{Han}\p{Hiragana}\p{Katakana}]]+|[^\s\p{L}\p{M}\p{N}_]",
    regex.V1,
)


ImageDigests = tuple[str, ...]
"""Digests of a task's images."""


def image_digests(task: Task) -> ImageDigests:
    """Digests of the images of a task; tasks with different images are different."""
    return tuple(image.sha256 for image in image_refs_of(task.metadata))


def flatten_prompt(task: Task) -> str:
    """The prompt as text; of a chat all messages except system messages."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(message["content"] for message in task.prompt if message["role"] != "system")


def normalize_text(text: str) -> str:
    """Normalise a text for comparison: NFKC, case folding, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """Words, punctuation marks and Chinese or Japanese characters of a normalised text, in order."""
    return _WORD.findall(text)


def word_ngrams(of: list[str], length: int) -> Iterator[str]:
    """Every sequence of `length` words; all words if there are fewer."""
    for start in range(max(len(of) - length, 0) + 1):
        yield " ".join(of[start : start + length])


class DeduplicateTasks(TaskOperatorSection):
    """Keeps the first of several tasks with the same or nearly the same prompt."""

    keeps_first: ClassVar[bool] = True

    name: Literal["deduplicate"] = "deduplicate"
    by: Literal["exact", "near"] = "exact"
    """`exact`: equal except for case, spaces and Unicode form. `near`: equal except for some words (extra `dedup`)."""
    threshold: float = Field(0.9, gt=0, le=1)
    """Minimum Jaccard similarity of the word n-grams of duplicates. Only with `near`."""
    ngram: int = Field(3, ge=1)
    """Words per n-gram. Only with `near`."""
    permutations: int = Field(128, ge=16)
    """Length of the MinHash signatures; longer ones miss fewer duplicates. Only with `near`."""
    pictures: Literal["exact", "alike"] = "exact"
    """Pictures of duplicates: `exact`: the same files. `alike`: they look the same, scaled or compressed in another way
    (perceptual hash)."""
    picture_distance: int = Field(4, ge=0, le=32)
    """Bits, of 64, in which the hashes of pictures may differ. Only with `pictures: alike`."""
    conflicting: Literal["first", "drop"] = "first"
    """Same prompt with different answers: keep the `first`, or `drop` all, because the right answer is unknown."""

    def extras(self) -> dict[str, tuple[str, str]]:
        return {"by": ("dedup", "datasketch")} if self.by == "near" else {}

    @model_validator(mode="after")
    def _near_only(self) -> Self:
        fields = type(self).model_fields
        for key in ("threshold", "ngram", "permutations"):
            if self.by == "exact" and getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is honoured with by: near; set it or remove {key}")
        if self.pictures == "exact" and self.picture_distance != fields["picture_distance"].default:
            raise ValueError("picture_distance is honoured with pictures: alike; set it or remove picture_distance")
        return self

    def __call__(self, batch: TaskBatch) -> None:
        """Keep the first task of each group of duplicates; with `conflicting: drop` none if their answers differ.

        Tasks with different images are not duplicates; which are different, `pictures` says.
        """
        seen = self._looks(batch.tasks)
        groups: Iterable[list[Task]]
        if self.by == "exact":
            equal: dict[Any, list[Task]] = {}
            for task, own in zip(batch.tasks, seen, strict=True):
                equal.setdefault((normalize_text(flatten_prompt(task)), own), []).append(task)
            groups = equal.values()
        else:
            groups = self._near(batch.tasks, seen)
        for group in groups:
            answers = {_answer(task) for task in group}
            if len(answers) > 1 and self.conflicting == "drop":
                for task in group:
                    batch.drop(task, "same prompt, other answer")
                continue
            for task in group[1:]:
                same = _answer(task) == _answer(group[0])
                batch.drop(task, "duplicate" if same else "same prompt, other answer")

    def _looks(self, tasks: list[Task]) -> list[Any]:
        """For each task something that is equal for the same images: digests, or the first task with images alike."""
        if self.pictures == "exact":
            return [image_digests(task) for task in tasks]
        index, found = PictureIndex(self.picture_distance), list[int]()
        hashes: dict[str, PictureHash] = {}
        for task in tasks:
            own = []
            for image in image_refs_of(task.metadata):
                try:
                    own.append(hashes.get(image.sha256) or hashes.setdefault(image.sha256, hash_picture(image)))
                except TasksetError as error:
                    raise TasksetError(f"task {task.id}: {error}") from error
            found.append(index.find(own))
        return found

    def _near(self, tasks: list[Task], seen: list[Any]) -> Iterator[list[Task]]:
        """Group tasks around the first of each group: MinHash finds candidates, the Jaccard similarity decides."""
        try:
            from datasketch import MinHash, MinHashLSH
        except ModuleNotFoundError as error:
            raise ConfigError("deduplicate by `near` needs datasketch: pip install 'rollmill[dedup]'") from error
        index = MinHashLSH(threshold=self.threshold, num_perm=self.permutations)
        groups: list[list[Task]] = []
        kept: list[set[str]] = []
        looks: list[Any] = []
        for task, own in zip(tasks, seen, strict=True):
            shingles = set(word_ngrams(words(normalize_text(flatten_prompt(task))), self.ngram))
            sketch = MinHash(num_perm=self.permutations, seed=1)
            sketch.update_batch([shingle.encode(errors="surrogatepass") for shingle in shingles])
            candidates = sorted(
                number
                for number in index.query(sketch)
                if len(kept[number] & shingles) / len(kept[number] | shingles) >= self.threshold
                and looks[number] == own
            )
            if candidates:
                groups[candidates[0]].append(task)
                continue
            index.insert(len(groups), sketch)
            groups.append([task])
            kept.append(shingles)
            looks.append(own)
        yield from groups


def _answer(task: Task) -> str:
    return json.dumps(task.answer, sort_keys=True, default=str)


_FEW = 2
"""A sequence in at most this many held-out prompts never counts as part of a template."""


class DecontaminateTasks(TaskOperatorSection):
    """Drops tasks whose prompt overlaps with held-out ones."""

    name: Literal["decontaminate"] = "decontaminate"
    against: list[RowsSection] = []
    """Held-out tasks: sections with the keys of a taskset's rows. Default: the stage's `evaluation.taskset`."""
    ngram: int = Field(13, ge=2)
    """Drop a task if its prompt shares an n-gram of this many words with a held-out prompt. Shorter prompts are
    compared as a whole."""
    common: float = Field(0.1, gt=0, le=1)
    """N-grams in more than this fraction of the held-out prompts (and in more than 2) are part of a template and are
    ignored."""
    _whole: set[tuple[ImageDigests, str]] = PrivateAttr()
    _telling: set[tuple[ImageDigests, str]] = PrivateAttr()

    @property
    def lacks_held_out(self) -> bool:
        return not self.against

    def setup(self, read: TaskReader) -> None:
        self.compare_with([task for rows in self.against for task in read(rows)])

    def compare_with(self, held_out: Sequence[Task]) -> None:
        """Remember the prompts of held-out tasks. The same question about other images is another prompt."""
        self._whole = set()
        counts: Counter[tuple[ImageDigests, str]] = Counter()
        for task in held_out:
            found, pictures = words(normalize_text(flatten_prompt(task))), image_digests(task)
            self._whole.add((pictures, " ".join(found)))
            if len(found) >= self.ngram:
                counts.update({(pictures, sequence) for sequence in word_ngrams(found, self.ngram)})
        most = max(_FEW, self.common * len(held_out))
        self._telling = {sequence for sequence, count in counts.items() if count <= most}

    def __call__(self, batch: TaskBatch) -> None:
        for task in batch.tasks:
            found, pictures = words(normalize_text(flatten_prompt(task))), image_digests(task)
            if (pictures, " ".join(found)) in self._whole:
                batch.drop(task, "held out")
            elif len(found) >= self.ngram and any(
                (pictures, sequence) in self._telling for sequence in word_ngrams(found, self.ngram)
            ):
                batch.drop(task, f"{self.ngram} words of a held-out prompt")
