"""Made-up rollouts and what a pipeline needs to process them: real tokenizer, real rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rollmill.config.components import OperatorConfig
from rollmill.config.operators import OperatorSection
from rollmill.pipelines import OperatorReport, Pipeline, PipelineContext
from rollmill.pipelines.pipeline import PipelineResources, build_pipeline
from rollmill.rewards import build_reward_manager
from rollmill.trackers.rollout_log import encode_experience
from rollmill.types import Experience, StopReason, Task, Turn
from support.toys import toy_tokenizer

PROMPT = "what is 6 x 2?"
_ADAPTER: TypeAdapter[Any] = TypeAdapter(OperatorConfig)


@cache
def tokenizer() -> Any:
    return toy_tokenizer("char")


def rollout(
    reward: float | None = 1.0,
    *,
    index: int = 0,
    group: str = "g0",
    task: str = "t0",
    text: str = "it is 12",
    length: int | None = None,
    stop: StopReason = StopReason.EOS,
    parts: dict[str, float | None] | None = None,
    outcomes: dict[str, str] | None = None,
    version: int = 3,
) -> Experience:
    """A completion with the tokens of `text` and an end, or `length` different made-up tokens."""
    prompt = tokenizer().encode(PROMPT)
    readable = text.encode(errors="replace").decode()  # tokenizers refuse lone surrogates
    ids = [*tokenizer().encode(readable), tokenizer().eos_token_id] if length is None else list(range(5, 5 + length))
    mask = np.arange(len(prompt) + len(ids)) >= len(prompt)
    return Experience(
        id=f"{group}/{index}",
        task_id=task,
        group=group,
        token_ids=np.array([*prompt, *ids], np.int32),
        action_mask=mask,
        logprobs=np.where(mask, -0.5 - index, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        reward_parts=parts if parts is not None else {"exact": reward},
        stop_reason=stop,
        turns=[Turn("prompt", 0, len(prompt), PROMPT), Turn("assistant", len(prompt), len(mask), text)],
        prompt=PROMPT,
        response=text,
        info={"outcomes": outcomes if outcomes is not None else {"exact": "ok"}},
    )


def group(rewards: Sequence[float | None], *, name: str = "g0", task: str = "t0", **each: Any) -> list[Experience]:
    """Completions of one task. Lists in `each` give every completion a value of its own."""
    own = [
        {key: value[index] if isinstance(value, list) else value for key, value in each.items()}
        for index in range(len(rewards))
    ]
    return [
        rollout(reward, index=index, group=name, task=task, **values)
        for index, (reward, values) in enumerate(zip(rewards, own, strict=True))
    ]


TASKS = {f"t{number}": Task(f"t{number}", PROMPT, answer="12", response="it is 12") for number in range(9)}


def context(**changes: Any) -> PipelineContext:
    """Step 8 of a run whose weights are version 7."""
    known = PipelineContext(
        step=8,
        version=7,
        tokenizer=tokenizer(),
        end_id=tokenizer().eos_token_id,
        max_new_tokens=100,
        deadline_s=60.0,
        task=TASKS.__getitem__,
        observe=lambda task, successes: None,
    )
    return replace(known, **changes)


def section(**options: Any) -> OperatorSection:
    """An operator as in a run file."""
    found: OperatorSection = _ADAPTER.validate_python(options)
    return found


def pipeline(*sections: dict[str, Any] | str, seed: int = 0) -> Pipeline:
    """The pipeline of these entries of a run file."""
    written = [{"name": each} if isinstance(each, str) else each for each in sections]
    resources = PipelineResources(
        build_reward_manager=lambda rewards: build_reward_manager(rewards, tokenizer=tokenizer()), seed=seed
    )
    return build_pipeline([section(**each) for each in written], resources)


def process(
    sections: dict[str, Any] | str | Sequence[dict[str, Any] | str], experiences: Sequence[Experience], **changes: Any
) -> tuple[list[Experience], OperatorReport]:
    """What comes out of a pipeline, and the report of its last operator."""
    listed = [sections] if isinstance(sections, dict | str) else list(sections)
    made = pipeline(*listed)
    try:
        found = asyncio.run(made.process(experiences, context(**changes)))
    finally:
        made.close()
    return found, list(made.take_reports().values())[-1]


def rewards(experiences: Sequence[Experience]) -> list[float | None]:
    return [None if each.reward is None else round(each.reward, 6) for each in experiences]


def ids(experiences: Sequence[Experience]) -> list[str]:
    return [each.id for each in experiences]


def plain(experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Everything in them, comparable."""
    return [encode_experience(each) for each in experiences]
