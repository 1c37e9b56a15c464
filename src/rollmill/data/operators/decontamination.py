"""Training tasks that overlap with held-out ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rollmill.config.task_operators import DecontaminateTasks
from rollmill.data.operators.batch import TaskBatch
from rollmill.data.operators.text import ImageDigests, flatten_prompt, image_digests, normalize_text, word_ngrams, words
from rollmill.types import Task

_FEW = 2
"""A sequence in so many held-out prompts is never taken for a part of a template."""


def decontaminate(options: DecontaminateTasks, held_out: Sequence[Task]) -> Callable[[TaskBatch], None]:
    """Drops tasks whose prompt is a held-out one, or has a sequence of words in common with one.

    The same question about other pictures is another prompt.
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
