"""A shelf of earlier completions, which serve as drafts the next time their task is rolled out (arXiv:2509.23232).

The rule of acceptance is exact for drafts as they were sampled. So none is chosen by what is in it: every completion
goes onto the shelf, whole or cut off, whatever it earned; one that is under way has left it; and of two that were under
way at the same time the one that was asked for later stays, not the one that ended later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollmill.config.rollout import ReuseConfig
from rollmill.engines.base import Draft
from rollmill.types import Completion

DraftSlot = dict[int, Draft]
"""The drafts of one task, by index within the group."""


class DraftCache:
    """The latest completions of the tasks that were rolled out last."""

    def __init__(self, config: ReuseConfig) -> None:
        self.top = config.top
        self._tasks = config.tasks
        self._slots: dict[str, DraftSlot] = {}
        self._marked: dict[str, DraftSlot] = {}

    def take(self, task_id: str, n: int) -> tuple[Sequence[Draft | None], DraftSlot]:
        """Drafts for the n completions of a task that is about to be rolled out, and where its new ones belong."""
        old, new = self._slots.pop(task_id, {}), DraftSlot()
        self._slots[task_id] = new
        if len(self._slots) > self._tasks:
            del self._slots[next(iter(self._slots))]
        return [old.get(index) for index in range(n)], new

    def mark(self) -> None:
        """Note a step boundary: what `state_dict` gives, even if the next step has begun."""
        self._marked = {task_id: dict(slot) for task_id, slot in self._slots.items()}

    def state_dict(self) -> dict[str, Any]:
        """The shelf at the last mark, in a few tensors: drafts laid end to end, N tokens in all."""
        named = [(task_id, index, draft) for task_id, slot in self._marked.items() for index, draft in slot.items()]
        drafts = [draft for _, _, draft in named]
        return {
            "tasks": list(self._marked),
            "owners": [task_id for task_id, _, _ in named],
            "indices": [index for _, index, _ in named],
            "lengths": [len(draft.token_ids) for draft in drafts],
            "token_ids": _joined([draft.token_ids for draft in drafts]),
            "top_ids": _joined([draft.top_ids for draft in drafts]),
            "top_probs": _joined([draft.top_probs for draft in drafts]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._slots = {task_id: DraftSlot() for task_id in state["tasks"]}
        start = 0
        for owner, index, length in zip(state["owners"], state["indices"], state["lengths"], strict=True):
            arrays = [state[key][start : start + length].numpy() for key in ("token_ids", "top_ids", "top_probs")]
            self._slots[owner][index] = Draft(*arrays)
            start += length
        self.mark()


def draft_from_completion(completion: Completion) -> Draft:
    """A completion whose most probable tokens were recorded."""
    assert completion.top_ids is not None
    assert completion.top_probs is not None
    return Draft(completion.token_ids, completion.top_ids, completion.top_probs)


def _joined(arrays: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0)
