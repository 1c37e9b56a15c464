"""`rollout`: how completions are sampled, and the native engine's limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.section import Section


class RepetitionConfig(Section):
    """A completion that says the same again and again ends early, with the stop reason `repetition`."""

    period: int = Field(64, ge=1)
    """Longest stretch of tokens that is looked for."""
    times: int = Field(4, ge=2)
    """How often in a row it must stand there."""
    tokens: int = Field(64, ge=2)
    """And how many tokens all of them must have together: `0000` is no endless loop."""
    penalty: float = Field(0.0, ge=0)
    """Taken off the reward, as the part `rollout/repetition`."""


class NgramConfig(Section):
    """Guess how a completion goes on: what followed the last time that its latest tokens stood in prompt or text."""

    length: int = Field(4, ge=1)
    """How many of the latest tokens are looked up."""
    tokens: int = Field(12, ge=1)
    """How many tokens are guessed and checked together."""


class SamplingConfig(Section):
    """How one completion is sampled."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy. Training refuses 0: there is nothing to compare within a group."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most probable tokens that together hold this much probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Keep only the K most probable tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less probable than min_p times the most probable one."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest completion in tokens; the model's context may end it sooner."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Stop strings: the completion ends where one appears; the text ends before it, the tokens keep it."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Token ids that end a completion, besides all EOS ids of the checkpoint."""
    repetition: RepetitionConfig | None = None
    """End completions that repeat themselves; `{}` takes the defaults."""
    ngram_draft: NgramConfig | None = None
    """Guess tokens that repeat earlier ones and check several in one pass; `{}` takes the defaults. The distribution of
    what is sampled stays the same, and only text that repeats a lot (copied code, tables) comes faster."""


class ReuseConfig(Section):
    """A task's completions are drafts for the next time it is rolled out: what new weights agree with is taken over."""

    top: int = Field(8, ge=1)
    """Probabilities remembered at each token, of the most probable tokens. A token that was not among them is sampled
    anew, and with it all that follow."""
    tasks: int = Field(1024, ge=1)
    """Tasks whose latest completions are remembered; those rolled out longest ago are forgotten first."""


class PartialConfig(Section):
    """Completions that a token budget has cut into segments, each written by other weights."""

    learn: Literal["all", "newest"] = "all"
    """`all`: every token counts in the loss. `newest`: only those of the last segment."""


class RolloutConfig(SamplingConfig):
    """Rollouts for training."""

    batch: int = Field(16, ge=1, le=2**20)
    """Tasks per training step."""
    group_size: int = Field(8, ge=1, le=2**16)
    """Completions per task."""
    max_sequences: int = Field(256, ge=1)
    """Completions decoded at the same time; more wait in the queue."""
    prefill_tokens: int = Field(2048, ge=16)
    """Prompt tokens processed per engine step; longer prompts are cut into chunks."""
    reuse: ReuseConfig | None = None
    """Speculative reuse of earlier completions; `{}` takes the defaults. Only where tasks come again, and only with
    workflow `single_turn`. What is sampled follows the new weights' distribution exactly."""
    deadline_s: float = Field(600.0, gt=0)
    """Longest wait for one batch of completions and their rewards."""
    refills: int = Field(10, ge=1)
    """How many batches' worth of groups may be lost in one step before the run ends with an error: dropped by the
    pipeline, or rejected by the workflow. For every one of them another task is rolled out."""
    attempts: int = Field(1, ge=1)
    """How often a rollout is tried by its workflow, each time with other random numbers, until a try does not fail.
    A try fails when its environment crashes, the workflow raises, or its time is up."""
    time_limit_s: float | None = Field(None, gt=0)
    """Longest time for one try of a rollout, with all its turns and its waits for the engine."""
    failures: Literal["stop", "reject"] = "stop"
    """When the last try of a rollout has failed: end the run with an error, or learn from the rest of its group."""
    oversample: float = Field(0.0, ge=0)
    """This share more groups are started than a step needs; when enough have their tokens, the others are stopped.
    Their tasks come again first, from the beginning."""
    token_budget: int | None = Field(None, ge=1)
    """Tokens that are generated for a step. When they are spent and the step's groups are whole, unfinished completions
    are put away, and go on in the next step with the new weights. Needs max_staleness of at least 1."""
    partial: PartialConfig = PartialConfig()
