"""The rollout engine protocol: requests, drafts and the methods every engine offers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.types import Completion, DraftUseArray, FloatArray, IntArray, RoutingArray

if TYPE_CHECKING:
    from torch import Tensor

    from rollmill.data.picture_prompts import PicturePrompt


@dataclass(frozen=True, slots=True, eq=False)
class CompletionPrefix:
    """Tokens a completion begins with, sampled earlier and perhaps by older weights. Arrays are [T].

    `top_ids` and `top_probs` [T, K] are copied from the original Completion, where it recorded them.
    """

    token_ids: IntArray
    logprobs: FloatArray
    kept_logmass: FloatArray
    versions: IntArray
    top_ids: IntArray | None = None
    top_probs: FloatArray | None = None
    routing: RoutingArray | None = None  #: experts of that Completion, prompt included
    drafted: DraftUseArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens of a completion, with the distributions they were drawn from, as far as known.

    Shapes: token_ids [T]; top_ids and top_probs [T, K], the K most probable tokens and their probabilities after
    temperature and truncation. K = 0 marks tokens that were guessed, not sampled.
    """

    token_ids: IntArray
    top_ids: IntArray
    top_probs: FloatArray


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, passed to a request's token callback.

    `logprob` and those of `top` are at the request's temperature (1 for greedy requests), without truncation.
    """

    index: int  #: index of the completion
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  #: the request's `top` most probable tokens with their log-probs


class LogitsProcessor(Protocol):
    """Changes the distribution that one completion is sampled from: penalties, biases, a grammar.

    A completion sampled in this way still records the log-probs that training needs: see `Completion.kept_logmass`.
    """

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        """The logits [V], float32, that the next token is sampled from; -inf excludes a token. `logits_V` is unchanged.

        Args:
            tokens: those of the completion so far; each call has all of the call before.
            logits_V: the model's, before temperature and truncation.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """Penalties and biases of a request, as in OpenAI's API and vLLM; the defaults change nothing.

    Attributes:
        presence: subtracted from the logits of tokens that the completion has.
        frequency: likewise, times their number.
        repetition: divides positive logits of tokens in prompt and completion, and multiplies negative ones
            (Keskar et al. 2019, arXiv 1909.05858, section 4.1).
        bias: added to the logits of tokens, before all penalties.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def neutral(self) -> bool:
        """True if nothing changes."""
        return not self.bias and (self.presence, self.frequency, self.repetition) == (0.0, 0.0, 1.0)


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A request for `n` completions of one prompt.

    A completion depends only on the weights, the prompt, `seed`, its index and its prefix, not on other rows of the
    batch; a draft changes how it is drawn, never its distribution. `id` names the request in error messages.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    n: int = 1
    seed: int = 0
    id: str = "request"
    prefixes: Sequence[CompletionPrefix | None] = ()  #: by index; the returned completion includes them
    drafts: Sequence[Draft | None] = ()  #: drafts by index
    new_processor: Callable[[], LogitsProcessor] | None = None
    """Creates the processor of a completion; disables drafts. Engines without `applies_processors` ignore it."""
    on_token: Callable[[SampledToken], None] | None = None
    """Callback for every sampled token; disables drafts. The completion decides which tokens count."""
    top: int = 0  #: number of most probable tokens passed to `on_token`
    record_top: int = 0  #: number of most probable tokens recorded per position, to build drafts from
    pictures: PicturePrompt | None = None  #: of the prompt, for vision-language models
    continues: bool = False
    """The conversation may go on from these completions: an engine may keep what the next turn can start from."""
    ignore_eos: bool = False  #: end-of-sequence ids do not end its completions
    counted: bool = False
    """Its tokens are in `tokens_generated` as soon as they are sampled, for callers that interrupt it by a budget."""

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Token ids that end its completions; `eos_ids` are those of the engine."""
        return frozenset(self.sampling.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)


def applies_processors(engine: RolloutEngine) -> bool:
    """True if an engine honours `GenerationRequest.new_processor`: it has an attribute `applies_processors` that says
    so."""
    return bool(getattr(engine, "applies_processors", False))


@dataclass(frozen=True, slots=True)
class EngineUse:
    """A stage's wishes for its engine besides completions."""

    record_routing: bool = False  #: record the experts of each token, for training through the same ones
    weights: Path | None = None
    """Place of weights that somebody shares already, for an engine in another process; None: `build_publisher` shares
    them at the engine's `weights_path`."""
    reader: str = ""  #: what the sender of those weights knows the engine by


class RolloutEngine(Protocol):
    """Protocol of a rollout engine. All methods are called from one asyncio event loop."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        ...

    @property
    def tokens_generated(self) -> int:
        """Tokens generated since the engine was created."""
        ...

    async def wait_for_tokens(self) -> None:
        """Wait until more tokens may have been sampled: one step, or a moment. Needed for token budgets only."""
        ...

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Return all n completions, ordered by index. Cancelling the call aborts the request."""
        ...

    def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        """Yield the n completions as they finish."""
        ...

    def interrupt(self) -> None:
        """Stop all requests: unfinished completions are returned as they are, with the stop reason `aborted`.

        Completions that had not started have the tokens of their prefix, or none. May be called again until all are
        there. Requested again with its tokens as prefix and the same seed, a completion continues: in the native engine
        as if never interrupted, apart from rounding; in vLLM with other random numbers.
        """
        ...

    def pause(self) -> None:
        """Stop decoding after the current step; requests are kept."""
        ...

    def resume(self) -> None:
        """Resume decoding."""
        ...

    def weights_updated(self, version: int) -> None:
        """Report new weights: later tokens carry `version`; nothing computed with the old weights is reused."""
        ...

    async def drain(self) -> None:
        """Wait until nothing is running or queued, or the engine has paused."""
        ...

    async def sleep(self, *, destroy: bool = False) -> None:
        """Free memory until new weights or requests arrive, if the engine can. No request may be running.

        Args:
            destroy: end the engine's process; the next request starts another. Only asked of engines that have one.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Return engine-specific counts since the engine was created, for metrics."""
        ...

    async def close(self) -> None:
        """Abort all requests and free memory."""
        ...
