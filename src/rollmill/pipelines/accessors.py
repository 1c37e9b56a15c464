"""What operators read off experiences: the reward or a part of it, success, the completion, its tokens."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rollmill.pipelines.batch import Batch
from rollmill.rewards.base import GATED, LATE, TIMEOUT
from rollmill.types import Completion, Experience, StopReason


def rollouts_of(batch: Batch) -> list[Experience]:
    """The rollouts of a batch."""
    return [experience for group in batch.groups().values() for experience in group]


def reward_value(experience: Experience, part: str | None) -> float | None:
    """The reward, or a part of it; None where there is none, or no finite one."""
    value = experience.reward if part is None else experience.reward_parts.get(part)
    return value if value is not None and math.isfinite(value) else None


def is_success(experience: Experience, part: str | None, threshold: float) -> bool | None:
    """Whether the reward (or a part) is at least `threshold`; None where it was not judged.

    A part that is missing because a gate was closed, or because judging took too long, is a failure.
    """
    value = reward_value(experience, part)
    if value is not None:
        return value >= threshold
    if part is None or part in experience.reward_parts:
        return None
    outcome = experience.info.get("outcomes", {}).get(part.partition("/")[0])
    return False if outcome in (GATED, TIMEOUT, LATE) else None


def is_finished(experience: Experience) -> bool:
    """Whether the completion came to an end of its own."""
    return experience.stop_reason in (StopReason.EOS, StopReason.STOP)


def response_length(experience: Experience) -> int:
    """Tokens of the policy; where all are masked, tokens after the prompt."""
    return experience.action_tokens or len(response_ids(experience))


def response_ids(experience: Experience) -> npt.NDArray[np.int64]:
    """The tokens after the prompt, whoever produced them."""
    return experience.token_ids[prompt_length(experience) :].astype(np.int64)


def prompt_length(experience: Experience) -> int:
    """How many tokens precede the first turn of the policy."""
    starts = [turn.start for turn in experience.turns if turn.role == "assistant"]
    if starts:
        return starts[0]
    actions = np.flatnonzero(experience.action_mask)
    return int(actions[0]) if len(actions) else len(experience.token_ids)


def to_completion(experience: Experience, index: int = 0) -> Completion:
    """An experience as rewards see it. All turns after the prompt count as the completion's tokens.

    A masked one keeps the version of its oldest token, by which rewards with `after_steps` go.
    """
    start = prompt_length(experience)
    rest = slice(start, None)
    versions = experience.versions[rest]
    if not experience.action_tokens:
        versions = np.full_like(versions, experience.info.get("masked", 0))
    return Completion(
        prompt_ids=experience.token_ids[:start],
        token_ids=experience.token_ids[rest],
        logprobs=experience.logprobs[rest],
        versions=versions,
        kept_logmass=np.zeros(len(experience.token_ids) - start, np.float32),
        text=experience.response,
        stop_reason=experience.stop_reason,
        seed=0,
        index=index,
    )
