"""What every rollout engine offers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.types import Completion, FloatArray, IntArray, RoutingArray


@dataclass(frozen=True, slots=True, eq=False)
class CompletionPrefix:
    """What a completion begins with: tokens that were sampled earlier, perhaps with older weights. [T] each.

    `top_ids` and `top_probs` [T, K] are those of the Completion they come from, where it recorded them.
    """

    token_ids: IntArray
    logprobs: FloatArray
    kept_logmass: FloatArray
    versions: IntArray
    top_ids: IntArray | None = None
    top_probs: FloatArray | None = None
    routing: RoutingArray | None = None  #: of that Completion, prompt included


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens that a completion may consist of, and the distribution each was drawn from, as far as it is known.

    Shapes: token_ids [T]; top_ids and top_probs [T, K], the K tokens that were most probable and their probabilities
    after temperature and truncation. K = 0 stands for tokens that were not sampled but guessed.
    """

    token_ids: IntArray
    top_ids: IntArray
    top_probs: FloatArray


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, the moment it was sampled.

    `logprob` and those of `top` are at the request's temperature (1 where it is greedy), without truncation.
    """

    index: int  #: of the completion
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  #: the most probable tokens with their log-probs, as many as were asked for


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """Ask for `n` completions of one prompt.

    A completion depends on the weights, the prompt, `seed`, its index and what it is begun with only, not on what
    shares the batch; a draft changes how it is drawn, never its distribution. `id` names the request in error messages.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    n: int = 1
    seed: int = 0
    id: str = "request"
    begun: Sequence[CompletionPrefix | None] = ()  #: by index; the completion returned has these tokens, too
    drafts: Sequence[Draft | None] = ()  #: by index
    on_token: Callable[[SampledToken], None] | None = None
    """Told of every token as it is sampled, so that drafts are not used; the completion says which ones count."""
    top: int = 0  #: how many of the most probable tokens it is told of
    record_top: int = 0  #: note so many of the most probable tokens at every position, so that drafts can be made of it


class RolloutEngine(Protocol):
    """An engine. All methods are called from one asyncio event loop."""

    version: int
    """Version of the weights that the next token is sampled from."""
    tokens_generated: int
    """Since it was made."""

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """All n completions, ordered by index. Cancelling the call aborts the request."""
        ...

    def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        """The n completions one by one, as they end."""
        ...

    def interrupt(self) -> None:
        """End everything under way: what is unfinished is handed out as it is, with the stop reason `aborted`.

        Completions that had not started have the tokens they were begun with, or none. Begun with its tokens and asked
        for with the same seed, a completion goes on as if nothing had happened, apart from rounding.
        """
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

    async def drain(self) -> None:
        """Wait until nothing is running or queued, or the engine has paused."""
        ...

    async def sleep(self) -> None:
        """Hand back memory until new weights or requests come, where the engine can. Nothing may be under way."""
        ...

    def counters(self) -> dict[str, float]:
        """What it has counted since it was made, for metrics; each engine has names of its own."""
        ...

    async def close(self) -> None:
        """Abort what is running and free memory."""
        ...
