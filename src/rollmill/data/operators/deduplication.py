"""Removes duplicate tasks, and training tasks that overlap with held-out ones."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import regex

from rollmill.config.task_operators import DecontaminateTasks, DeduplicateTasks
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


def deduplicate(options: DeduplicateTasks) -> Callable[[TaskBatch], None]:
    """Keeps the first task of each group of duplicates; with `conflicting: drop` none if their answers differ.

    Tasks with different images are not duplicates; which are different, `pictures` says.
    """

    def apply(batch: TaskBatch) -> None:
        seen = _looks(batch.tasks, options)
        groups = _same(batch.tasks, seen) if options.by == "exact" else _near(batch.tasks, options, seen)
        for group in groups:
            answers = {_answer(task) for task in group}
            if len(answers) > 1 and options.conflicting == "drop":
                for task in group:
                    batch.drop(task, "same prompt, other answer")
                continue
            for task in group[1:]:
                same = _answer(task) == _answer(group[0])
                batch.drop(task, "duplicate" if same else "same prompt, other answer")

    return apply


def _answer(task: Task) -> str:
    return json.dumps(task.answer, sort_keys=True, default=str)


def _looks(tasks: list[Task], options: DeduplicateTasks) -> list[Any]:
    """For each task something that is equal for the same images: digests, or the first task with images alike."""
    if options.pictures == "exact":
        return [image_digests(task) for task in tasks]
    index, found = PictureIndex(options.picture_distance), list[int]()
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


def _same(tasks: list[Task], seen: list[Any]) -> Iterator[list[Task]]:
    groups: dict[Any, list[Task]] = {}
    for task, own in zip(tasks, seen, strict=True):
        groups.setdefault((normalize_text(flatten_prompt(task)), own), []).append(task)
    yield from groups.values()


def _near(tasks: list[Task], options: DeduplicateTasks, seen: list[Any]) -> Iterator[list[Task]]:
    """Group tasks around the first of each group: MinHash finds candidates, the Jaccard similarity decides."""
    try:
        from datasketch import MinHash, MinHashLSH
    except ModuleNotFoundError as error:
        raise ConfigError("deduplicate by `near` needs datasketch: pip install 'rollmill[dedup]'") from error
    index = MinHashLSH(threshold=options.threshold, num_perm=options.permutations)
    groups: list[list[Task]] = []
    kept: list[set[str]] = []
    looks: list[Any] = []
    for task, own in zip(tasks, seen, strict=True):
        shingles = set(word_ngrams(words(normalize_text(flatten_prompt(task))), options.ngram))
        sketch = MinHash(num_perm=options.permutations, seed=1)
        sketch.update_batch([shingle.encode(errors="surrogatepass") for shingle in shingles])
        candidates = sorted(
            number
            for number in index.query(sketch)
            if _jaccard(kept[number], shingles) >= options.threshold and looks[number] == own
        )
        if candidates:
            groups[candidates[0]].append(task)
            continue
        index.insert(len(groups), sketch)
        groups.append([task])
        kept.append(shingles)
        looks.append(own)
    yield from groups


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)


_FEW = 2
"""A sequence in at most this many held-out prompts never counts as part of a template."""


def decontaminate_by_sections(options: DecontaminateTasks, read: TaskReader) -> Callable[[TaskBatch], None]:
    """Drops tasks that overlap with those of `options.against`."""
    return decontaminate(options, [task for rows in options.against for task in read(rows)])


def decontaminate(options: DecontaminateTasks, held_out: Sequence[Task]) -> Callable[[TaskBatch], None]:
    """Drops tasks whose prompt is a held-out one, or shares an n-gram of words with one.

    The same question about other images is another prompt.
    """
    whole = set()
    counts: Counter[tuple[ImageDigests, str]] = Counter()
    for task in held_out:
        found, pictures = words(normalize_text(flatten_prompt(task))), image_digests(task)
        whole.add((pictures, " ".join(found)))
        if len(found) >= options.ngram:
            counts.update({(pictures, sequence) for sequence in word_ngrams(found, options.ngram)})
    most = max(_FEW, options.common * len(held_out))
    telling = {sequence for sequence, count in counts.items() if count <= most}

    def apply(batch: TaskBatch) -> None:
        for task in batch.tasks:
            found, pictures = words(normalize_text(flatten_prompt(task))), image_digests(task)
            if (pictures, " ".join(found)) in whole:
                batch.drop(task, "held out")
            elif len(found) >= options.ngram and any(
                (pictures, sequence) in telling for sequence in word_ngrams(found, options.ngram)
            ):
                batch.drop(task, f"{options.ngram} words of a held-out prompt")

    return apply
