"""`rollout`: sampling, rollout scheduling, and limits of the native engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rollmill.config.section import Section


class RepetitionConfig(Section):
    """Repetition detection: a completion that loops ends early, with the stop reason `repetition`."""

    period: int = Field(64, ge=1)
    """Maximum length of the repeated sequence, in tokens."""
    times: int = Field(4, ge=2)
    """Minimum number of consecutive repeats."""
    tokens: int = Field(64, ge=2)
    """Minimum number of tokens of all repeats together, so that `0000` does not count as a loop."""
    penalty: float = Field(0.0, ge=0)
    """Penalty subtracted from the reward, as the part `rollout/repetition`."""


class NgramConfig(Section):
    """N-gram speculative decoding: drafts the tokens that followed the latest n-gram when it last occurred in prompt or
    completion."""

    length: int = Field(4, ge=1)
    """Length of the n-gram that is looked up, in tokens."""
    tokens: int = Field(12, ge=1)
    """Number of draft tokens verified together."""


class SamplingConfig(Section):
    """Sampling of one completion."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy. Training rejects 0, because all completions of a group would be equal."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of most probable tokens with at least this total probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Keep only the K most probable tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less probable than min_p times the most probable one."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum completion length in tokens; the model's context may end it sooner."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Stop strings. The text ends before the stop string; the tokens include it."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Token ids that end a completion, in addition to the checkpoint's EOS ids."""
    repetition: RepetitionConfig | None = None
    """End completions that repeat themselves; `{}` uses the defaults."""
    ngram_draft: NgramConfig | None = None
    """Draft tokens from repeated n-grams and verify several in one forward pass; `{}` uses the defaults. The sampling
    distribution is unchanged; only repetitive text (copied code, tables) becomes faster."""


class ReuseConfig(Section):
    """Speculative reuse: a task's previous completions are drafts for its next rollout, and tokens that the new weights
    accept are kept."""

    top: int = Field(8, ge=1)
    """Number of most probable tokens whose probabilities are stored per position. A token outside of them is resampled,
    with all that follow."""
    tasks: int = Field(1024, ge=1)
    """Number of tasks whose latest completions are stored; the least recently rolled out are dropped first."""


class PartialConfig(Section):
    """Loss on completions that a token budget has split into segments of different weight versions."""

    learn: Literal["all", "newest"] = "all"
    """`all`: every token counts in the loss. `newest`: only tokens of the last segment."""


class RolloutConfig(SamplingConfig):
    """Rollouts for training."""

    batch: int = Field(16, ge=1, le=2**20)
    """Tasks per training step."""
    group_size: int = Field(8, ge=1, le=2**16)
    """Completions per task (the group)."""
    max_sequences: int = Field(256, ge=1)
    """Maximum number of completions decoded at the same time; others wait in a queue."""
    prefill_tokens: int = Field(2048, ge=16)
    """Maximum prompt tokens per engine step; longer prompts are processed in chunks."""
    reuse: ReuseConfig | None = None
    """Speculative reuse of earlier completions; `{}` uses the defaults. Only for tasks that are rolled out repeatedly
    with workflow `single_turn`. The sampling distribution is exactly that of the new weights."""
    deadline_s: float = Field(600.0, gt=0)
    """Timeout for one batch of completions and their rewards. An evaluation with more completions than a batch has
    proportionally longer."""
    refills: int = Field(10, ge=1)
    """Maximum number of batches' worth of groups that one step may lose to the pipeline or the workflow before the run
    ends with an error. Each lost group is replaced by another task."""
    attempts: int = Field(1, ge=1)
    """Maximum number of attempts per rollout, each with different random numbers. An attempt fails when its environment
    crashes, the workflow raises, or it times out."""
    time_limit_s: float | None = Field(None, gt=0)
    """Timeout of one rollout attempt, including all turns and waiting for the engine."""
    failures: Literal["stop", "reject"] = "stop"
    """When the last attempt of a rollout has failed: end the run with an error (`stop`), or train on the rest of its
    group (`reject`)."""
    oversample: float = Field(0.0, ge=0)
    """Start this fraction more groups than a step needs. When enough groups are complete, the others are cancelled and
    their tasks are restarted first."""
    token_budget: int | None = Field(None, ge=1)
    """Tokens to generate per step (partial rollouts). When they are used up and the step's groups are complete,
    unfinished completions are suspended and resume in the next step with the new weights. Needs max_staleness of at
    least 1."""
    partial: PartialConfig = PartialConfig()
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template for all chats of the stage, such as `enable_thinking: false`; those of a taskset,
    and of a row's column `chat_template_kwargs`, win. `serve` uses them, too."""

    def unused_keys(self) -> dict[str, str]:
        if self.token_budget is not None:
            return {}
        return {"partial": "not honoured without rollout.token_budget, which makes segments; give one"}

    def conflicts(self) -> dict[str, str]:
        found = {}
        if self.repetition is not None and max(self.repetition.tokens, self.repetition.times) > self.max_new_tokens:
            key = "tokens" if self.repetition.tokens > self.max_new_tokens else "times"
            text = f"completions end after rollout.max_new_tokens ({self.max_new_tokens}), before they have repeated"
            found[f"repetition.{key}"] = f"{text} so much; lower it"
        if self.reuse is not None and self.oversample:
            text = "with oversample the slowest groups are stopped, so that drafts would be chosen by their length"
            found["reuse"] = f"{text}; choose one of reuse and oversample"
        if self.token_budget is not None and self.reuse is not None:
            text = "drafts belong to whole completions, and a budget cuts them into parts"
            found["reuse"] = f"{text}; choose one of reuse and token_budget"
        if self.token_budget is not None and self.oversample:
            text = "with token_budget unfinished completions go on in the next step, with oversample they are stopped"
            found["oversample"] = f"{text}; choose one"
        return found
