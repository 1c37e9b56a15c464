"""Functions of rewards that run in grader processes, since they evaluate a model's text.

Only a grader process calls them, and each imports what it needs there: such a process starts in a fifth of the time
without the sections of run files.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

from rollmill_grading.worker_process import WorkerFunction

SCHEMA = WorkerFunction("schema", "rollmill.rewards.worker_functions:load_schema")
REASONING_GYM = WorkerFunction("reasoning_gym", "rollmill.rewards.worker_functions:load_reasoning_gym")


def load_schema(setup: str) -> Callable[[list[tuple[str, str]]], str]:
    """Return a function that gives a character per (schema, text): 1 valid, 0 invalid, x if the text is not JSON."""
    from rollmill.rewards.text.json_schema import validate_texts

    validate_texts([("{}", "{}")])
    return validate_texts


def load_reasoning_gym(setup: str) -> Callable[[dict[str, Any]], float | str]:
    """Return a function that gives reasoning-gym's score.

    "unscorable" if its scorer raises on this answer but not on the reference: some scorers raise on unexpected text,
    and a policy's text must not end a run.
    """
    import reasoning_gym

    logging.disable(logging.CRITICAL)

    @cache
    def dataset_of(name: str, options: bytes) -> Any:
        return reasoning_gym.create_dataset(name, **pickle.loads(options))

    def score(payload: dict[str, Any]) -> float | str:
        dataset = dataset_of(payload["name"], pickle.dumps(payload["options"]))
        try:
            return float(dataset.score_answer(payload["answer"], payload["entry"]))
        except MemoryError:
            raise
        except Exception:
            if payload["entry"]["answer"] is not None:  # some generators have a scorer but no solution
                dataset.score_answer(payload["entry"]["answer"], payload["entry"])
            return "unscorable"

    return score
