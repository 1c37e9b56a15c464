"""Tasks that ask the same, or nearly the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from rollmill.config.task_operators import DeduplicateTasks
from rollmill.data.operators.batch import TaskBatch
from rollmill.data.operators.text import flatten_prompt, image_digests, normalize_text, word_ngrams, words
from rollmill.errors import ConfigError
from rollmill.types import Task


def deduplicate(options: DeduplicateTasks) -> Callable[[TaskBatch], None]:
    """Keeps the first task of each group of duplicates; with `conflicting: drop` none, if their answers differ.

    Tasks with different pictures are different.
    """

    def apply(batch: TaskBatch) -> None:
        groups = _same(batch.tasks) if options.by == "exact" else _near(batch.tasks, options)
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


def _same(tasks: list[Task]) -> Iterator[list[Task]]:
    groups: dict[Any, list[Task]] = {}
    for task in tasks:
        groups.setdefault((normalize_text(flatten_prompt(task)), image_digests(task)), []).append(task)
    yield from groups.values()


def _near(tasks: list[Task], options: DeduplicateTasks) -> Iterator[list[Task]]:
    """Groups around the first task of each: MinHash finds candidates, and their sequences decide."""
    try:
        from datasketch import MinHash, MinHashLSH
    except ModuleNotFoundError as error:
        raise ConfigError("deduplicate by `near` needs datasketch: pip install 'rollmill[dedup]'") from error
    index = MinHashLSH(threshold=options.threshold, num_perm=options.permutations)
    groups: list[list[Task]] = []
    kept: list[set[str]] = []
    for task in tasks:
        shingles = set(word_ngrams(words(normalize_text(flatten_prompt(task))), options.ngram))
        sketch = MinHash(num_perm=options.permutations, seed=1)
        sketch.update_batch([shingle.encode(errors="surrogatepass") for shingle in shingles])
        candidates = sorted(
            number
            for number in index.query(sketch)
            if _jaccard(kept[number], shingles) >= options.threshold
            and image_digests(groups[number][0]) == image_digests(task)
        )
        if candidates:
            groups[candidates[0]].append(task)
            continue
        index.insert(len(groups), sketch)
        groups.append([task])
        kept.append(shingles)
    yield from groups


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)
