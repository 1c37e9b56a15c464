"""Exact duplicates: texts that are the same but for white space."""

from __future__ import annotations

import unicodedata
from hashlib import blake2b
from typing import Any

from rollmill.config.operators import DuplicatesOperator
from rollmill.pipelines.batch import Batch
from rollmill.pipelines.lru import LRUCache
from rollmill.types import Experience


class DuplicateFilter:
    """Drops completions whose text was there before. Digests of the texts are remembered, not the texts."""

    def __init__(self, options: DuplicatesOperator) -> None:
        self._options = options
        self._memory: LRUCache[bool] = LRUCache(options.memory)

    def __call__(self, batch: Batch) -> None:
        for group in batch.groups().values():
            memory = LRUCache[bool](len(group)) if self._options.within == "group" else self._memory
            for experience in group:
                key = self._key(experience)
                if memory.get(key):
                    batch.drop(experience, "duplicate")
                else:
                    memory.put(key, True)

    def _key(self, experience: Experience) -> str:
        text = normalize_whitespace(experience.response, ignore_case=self._options.ignore_case)
        task = f"{experience.task_id}\0" if self._options.within == "task" else ""
        return blake2b((task + text).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The digests, from the one that is forgotten first."""
        return {"seen": list(self._memory)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._memory = LRUCache(self._options.memory)
        for key in state["seen"]:
            self._memory.put(key, True)


def normalize_whitespace(text: str, *, ignore_case: bool = False) -> str:
    """The text in Unicode's composed form (NFC), with single blanks for white space."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text
