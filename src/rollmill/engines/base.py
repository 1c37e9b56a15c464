"""What every rollout engine offers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.core.types import Completion


@dataclass(slots=True, eq=False)
class Request:
    """Ask for `n` completions of one prompt.

    A completion depends on the weights, the prompt, `seed` and its index only, not on what shares the batch.
    `id` names the request in error messages.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    n: int = 1
    seed: int = 0
    id: str = "request"


class RolloutEngine(Protocol):
    """An engine. All methods are called from one asyncio event loop."""

    version: int
    """Version of the weights that the next token is sampled from."""

    async def generate(self, request: Request) -> list[Completion]:
        """All n completions, ordered by index. Cancelling the call aborts the request."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Completion]:
        """The n completions one by one, as they end."""
        ...

    def pause(self) -> None:
        """Stop decoding after the current step; requests are kept."""
        ...

    def resume(self) -> None:
        """Go on decoding."""
        ...

    def weights_updated(self, version: int) -> None:
        """The weights changed: later tokens carry `version`; nothing computed with the old weights is reused."""
        ...

    async def close(self) -> None:
        """Abort what is running and free memory."""
        ...
