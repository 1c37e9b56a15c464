"""`rollout`: how completions are sampled, and the native engine's limits."""

from __future__ import annotations

from typing import Annotated

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
    """How many batches' worth of groups the pipeline may drop in one step before the run ends with an error. For every
    dropped group another task is rolled out. Only with `pipeline`."""
