"""Training tasks that overlap with held-out ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rollmill.config.task_operators import DecontaminateTasks
from rollmill.core.types import Task
from rollmill.tasks.operators.batch import TaskBatch
from rollmill.tasks.operators.texts import Pictures, normalised, pictures_of, prompt_of, sequences, words

_FEW = 2
"""A sequence in so many held-out prompts is never taken for a part of a template."""


def decontaminate(options: DecontaminateTasks, held_out: Sequence[Task]) -> Callable[[TaskBatch], None]:
    """Drops tasks whose prompt is a held-out one, or has a sequence of words in common with one.

    The same question about other pictures is another prompt.
    """
    whole = set()
    counts: Counter[tuple[Pictures, str]] = Counter()
    for task in held_out:
        found, pictures = words(normalised(prompt_of(task))), pictures_of(task)
        whole.add((pictures, " ".join(found)))
        if len(found) >= options.ngram:
            counts.update({(pictures, sequence) for sequence in sequences(found, options.ngram)})
    most = max(_FEW, options.common * len(held_out))
    telling = {sequence for sequence, count in counts.items() if count <= most}

    def apply(batch: TaskBatch) -> None:
        for task in batch.tasks:
            found, pictures = words(normalised(prompt_of(task))), pictures_of(task)
            if (pictures, " ".join(found)) in whole:
                batch.drop(task, "held out")
            elif len(found) >= options.ngram and any(
                (pictures, sequence) in telling for sequence in sequences(found, options.ngram)
            ):
                batch.drop(task, f"{options.ngram} words of a held-out prompt")

    return apply
