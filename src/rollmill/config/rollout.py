"""`rollout`: how completions are sampled, and the native engine's limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.base import Section


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
    stop_token_ids: list[int] = []
    """Token ids that end a completion, besides all EOS ids of the checkpoint."""


class PartialConfig(Section):
    """Completions that a token budget has cut into segments, each written by other weights."""

    learn: Literal["all", "newest"] = "all"
    """`all`: every token counts in the loss. `newest`: only those of the last segment."""


class RolloutConfig(SamplingConfig):
    """Rollouts for training."""

    batch: int = Field(16, ge=1)
    """Tasks per training step."""
    group_size: int = Field(8, ge=1)
    """Completions per task."""
    max_sequences: int = Field(256, ge=1)
    """Completions decoded at the same time; more wait in the queue."""
    prefill_tokens: int = Field(2048, ge=16)
    """Prompt tokens processed per engine step; longer prompts are cut into chunks."""
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
