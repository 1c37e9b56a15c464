"""Results of rewards, and the part of a completion that a reward reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rollmill.config.rewards import Reward
from rollmill.rewards.values import RewardValue as RewardValue
from rollmill.types import REASONING_END, Completion, Experience

OK, TIMEOUT, LATE, NOT_APPLICABLE, GATED = "ok", "timeout", "late", "not_applicable", "gated"
MEMORY = "memory"
"""Outcome of a grader process that ran out of memory."""
NO_ANSWER, HEDGED = "no_answer", "hedged"
"""Outcomes of a completion without an answer, and of one that offers several."""


Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 with x1 <= x2 and y1 <= y2; a point has no area."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one reward for one completion. `outcome` is "ok" unless something else is worth counting.

    `queue_s` is the time in seconds until a worker started, `run_s` the time it then took; None if only the manager can
    measure it. `details` are numbers that are logged but not counted, such as the reward again under the task's
    subject. `boxes` are the places that the answer names, for display: left, top, right, bottom in pixels of the
    task's first image.
    """

    value: RewardValue
    outcome: str = OK
    queue_s: float = 0.0
    run_s: float | None = None
    details: dict[str, float] = field(default_factory=dict)
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardTiming:
    """Start and end of one reward on one completion, in `time.perf_counter()` seconds.

    Until `started` it waited for a worker.
    """

    requested: float
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The combined result of all rewards for one completion.

    `reward` is the weighted sum of the parts that apply, None if none does. `parts` has an entry per reward, or
    name/part for a reward with several parts. `outcomes` has an entry per reward: ok, timeout, late, not_applicable,
    gated, or an outcome specific to the reward. `seconds` is wall time, including the wait for a free worker; `spans`
    are the times of each reward. `failed_gate` names the gate that was not passed. `details` are numbers that rewards
    log but do not count, as name/key. `role` is the role of the policy that the completion was generated in, if any.
    `boxes` are those of all rewards.
    """

    reward: float | None
    parts: dict[str, float | None]
    outcomes: dict[str, str]
    seconds: float
    spans: dict[str, RewardTiming] = field(default_factory=dict)
    failed_gate: str | None = None
    details: dict[str, float] = field(default_factory=dict)
    role: str | None = None
    boxes: tuple[Box, ...] = ()


def find_answer(replied: Completion | Experience, after: str | None = None) -> str | None:
    """Return the text that counts as answer, or what follows the last `after` in it.

    None if the reasoning is unfinished or `after` is missing: then there is no answer. `after: </think>` is all of the
    answer, if reasoning comes before it.
    """
    reply = replied.parsed_reply
    if not reply.reasoning_finished:
        return None
    if after is not None and after.strip() == REASONING_END and reply.reasoning is not None:
        return reply.content
    return text_after(reply.content, after)


def text_after(text: str, marker: str | None) -> str | None:
    """Return the text after the last `marker`; all of it if `marker` is None, None if the marker is missing."""
    if marker is None:
        return text
    _, found, tail = text.rpartition(marker)
    return tail if found else None


def is_empty_answer(answer: Any) -> bool:
    """Return whether a task's answer is an empty text or list, or a list with an empty text."""
    if isinstance(answer, str):
        return not answer.strip()
    if isinstance(answer, list | tuple):
        return not answer or any(isinstance(each, str) and not each.strip() for each in answer)
    return isinstance(answer, Mapping) and not answer


def task_options(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return a task's options by letter, from its column `options` or `choices` (a mapping or a list); may be empty."""
    given = metadata.get("options") or metadata.get("choices")
    if not given:
        return {}
    from rollmill_grading.comparison import option_texts

    return option_texts(given)


TagName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")]


class TextReward(Reward):
    """Base of rewards that can score a part of the text they read: the answer, or the whole text of `language`."""

    after: str | None = None
    """Score only what follows the last occurrence of this text, for example "Answer:"."""
    tag: TagName | None = None
    """Score only the text inside the last `<tag>...</tag>`; give the name alone, for example `answer`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.after is not None and self.tag is not None:
            raise ValueError("after and tag both say where to look; give one of them")
        return self

    def select_answer(self, completion: Completion) -> str | None:
        """Return the part of the answer that `after` or `tag` says.

        None if it is missing, the tag is not closed, or the reasoning is unfinished.
        """
        answer = find_answer(completion, self.after)
        return answer if answer is None else self._inside_tag(answer)

    def select_text(self, text: str) -> str | None:
        """Return the part of a text that `after` or `tag` says; None if it is missing, or the tag is not closed."""
        found = text_after(text, self.after)
        return found if found is None else self._inside_tag(found)

    def _inside_tag(self, text: str) -> str | None:
        from rollmill_grading.segmentation import last_tag_content

        return text if self.tag is None else last_tag_content(text, self.tag)
