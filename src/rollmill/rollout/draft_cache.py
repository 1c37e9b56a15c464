"""Cache of earlier completions, used as drafts when their task is rolled out again (arXiv:2509.23232).

Acceptance is exact only for drafts as they were sampled, so none may be selected by its content: every completion is
cached, whole or truncated, whatever its reward; a running one has left the cache; and of two concurrent ones the one
requested later stays, not the one that finished later.
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
    """The latest completions of the most recently rolled out tasks."""

    def __init__(self, config: ReuseConfig) -> None:
        self.top = config.top
        self._tasks = config.tasks
        self._slots: dict[str, DraftSlot] = {}
        self._marked: dict[str, DraftSlot] = {}

    def take(self, task_id: str, n: int) -> tuple[Sequence[Draft | None], DraftSlot]:
        """Return drafts for the n completions of a task about to be rolled out, and the slot for its new ones."""
        old, new = self._slots.pop(task_id, {}), DraftSlot()
        self._slots[task_id] = new
        if len(self._slots) > self._tasks:
            del self._slots[next(iter(self._slots))]
        return [old.get(index) for index in range(n)], new

    def mark(self) -> None:
        """Record a step boundary, which `state_dict` returns even if the next step has started."""
        self._marked = {task_id: dict(slot) for task_id, slot in self._slots.items()}

    def state_dict(self) -> dict[str, Any]:
        """The cache at the last mark, in a few tensors: drafts concatenated, N tokens in all."""
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
        """Restore a state from `state_dict`."""
        self._slots = {task_id: DraftSlot() for task_id in state["tasks"]}
        start = 0
        for owner, index, length in zip(state["owners"], state["indices"], state["lengths"], strict=True):
            arrays = [state[key][start : start + length].numpy() for key in ("token_ids", "top_ids", "top_probs")]
            self._slots[owner][index] = Draft(*arrays)
            start += length
        self.mark()


def draft_from_completion(completion: Completion) -> Draft:
    """Build a draft from a completion with recorded top tokens."""
    assert completion.top_ids is not None
    assert completion.top_probs is not None
    return Draft(completion.token_ids, completion.top_ids, completion.top_probs)


def _joined(arrays: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0)
