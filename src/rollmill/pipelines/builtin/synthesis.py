"""Operators that make new experiences from rollouts: demonstrations, preference pairs and reflections.

They reuse the tokens that the policy produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from rollmill.config.operators import SuccessOperatorSection
from rollmill.pipelines.batch import Batch, is_finished, is_success, prompt_length, response_length, reward_value
from rollmill.pipelines.builtin.deduplication import LRUCache
from rollmill.types import (
    Experience,
    ExperienceSource,
    IntArray,
    StopReason,
    Turn,
    experience_from_demonstration,
    split_by_role,
)

if TYPE_CHECKING:
    from rollmill.pipelines.pipeline import PipelineResources


class DemonstrationOperator(SuccessOperatorSection):
    """Turns successes into demonstrations, which `mix`, `chord` and `sft` imitate."""

    creates_experiences: ClassVar[bool] = True

    name: Literal["demonstrations"] = "demonstrations"
    choose: Literal["best", "shortest", "first"] = "best"
    """Ranking of a group's successes. Ties are broken by length with `best`, and by reward with `shortest`."""
    count: int | None = Field(1, ge=1)
    """Maximum number per group; null: all."""
    per_task: int | None = Field(None, ge=1)
    """Maximum number per task in the whole run. Default: no limit."""
    memory: int = Field(100_000, ge=1)
    """Number of tasks to count; the least recently seen are dropped first. Only with `per_task`."""
    _made: LRUCache[int] = PrivateAttr()

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.per_task is not None, "with per_task")
        return self

    def setup(self, resources: PipelineResources) -> None:
        self._made = LRUCache(self.memory)

    def __call__(self, batch: Batch) -> None:
        for group in batch.groups().values():
            for experience in self._chosen(group):
                name = f"{experience.id}/{batch.operator}"
                made = _derived(experience, id=name, group=name, source=ExperienceSource.EXPERT)
                batch.add(made, "demonstration")

    def _chosen(self, group: Sequence[Experience]) -> list[Experience]:
        found, task = _successes(self.part, self.threshold, group), group[0].task_id
        if self.choose == "shortest":
            found.sort(key=lambda each: (response_length(each), -_measure(each, self.part)))
        elif self.choose == "best":
            found.sort(key=lambda each: (-_measure(each, self.part), response_length(each)))
        found = found[: self.count]
        if self.per_task is not None and found:
            made = self._made.get(task) or 0
            found = found[: max(self.per_task - made, 0)]
            self._made.put(task, made + len(found))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Number of demonstrations of each task, least recently used task first."""
        return {"made": [list(each) for each in self._made.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._made = LRUCache(self.memory)
        for task, made in state["made"]:
            self._made.put(task, made)


class PreferencePairOperator(SuccessOperatorSection):
    """Creates preference pairs from a group's completions, for `dpo` and reward models."""

    creates_experiences: ClassVar[bool] = True

    compares = True
    name: Literal["pairs"] = "pairs"
    by: Literal["reward", "length"] = "reward"
    """`reward`: the best against the worst, the second best against the second worst, and so on. `length` (Kimi k1.5):
    the shortest success against longer failures and much longer successes."""
    count: int = Field(1, ge=1)
    """Maximum number of pairs per group."""
    margin: float = Field(0.0, ge=0)
    """Minimum difference between the rewards of a pair (exclusive). Only with `by: reward`."""
    longer: float = Field(1.5, gt=1)
    """Length ratio from which a success is much longer. Only with `by: length`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("margin",), self.by == "reward", "with by: reward")
        self.reject_unused_keys(("longer", "threshold"), self.by == "length", "with by: length")
        return self

    def __call__(self, batch: Batch) -> None:
        """Add pairs; the chosen one has reward 1, the rejected one 0."""
        for name, group in batch.groups().items():
            choose = self._by_reward if self.by == "reward" else self._by_length
            found = [pair for own in split_by_role(group) for pair in choose(own)]
            for number, pair in enumerate(found[: self.count]):
                of = f"{name}/{batch.operator}/{number}"
                for role, reward, experience in zip(("chosen", "rejected"), (1.0, 0.0), pair, strict=True):
                    made = _derived(experience, id=f"{of}/{role}", group=of, source=ExperienceSource.PREFERENCE)
                    made.reward = reward
                    batch.add(made, "pair" if reward else "rejected of a pair")

    def _by_reward(self, group: Sequence[Experience]) -> list[tuple[Experience, Experience]]:
        """Pair the best with the worst, the second best with the second worst, and so on, while rewards differ."""
        known = [each for each in group if each.action_tokens and reward_value(each, self.part) is not None]
        order = sorted(known, key=lambda each: -_measure(each, self.part))
        couples = zip(order[: len(order) // 2], reversed(order), strict=False)
        return [
            (best, worst)
            for best, worst in couples
            if is_finished(best) and _measure(best, self.part) - _measure(worst, self.part) > self.margin
        ]

    def _by_length(self, group: Sequence[Experience]) -> list[tuple[Experience, Experience]]:
        """Pair by length (Kimi k1.5, arXiv:2501.12599, 2.4).

        The shortest success is preferred to each longer failure and to each success of at least `longer` times its
        length, longest first.
        """
        successes = _successes(self.part, self.threshold, group)
        if not successes:
            return []
        best = min(successes, key=response_length)
        rejected = []
        for each in group:
            success = is_success(each, self.part, self.threshold)
            least = self.longer * response_length(best) if success else response_length(best) + 1
            if success is not None and each is not best and each.action_tokens and response_length(each) >= least:
                rejected.append(each)
        return [(best, each) for each in sorted(rejected, key=response_length, reverse=True)]


class ReflectionOperator(SuccessOperatorSection):
    """Creates a demonstration from a failed attempt, a cue and a correct solution; the attempt is masked."""

    creates_experiences: ClassVar[bool] = True

    name: Literal["reflection"] = "reflection"
    cue: str = Field("\n\nWait, that is not right. Let me try again.\n\n", min_length=1)
    """Text between the attempt and the solution."""
    imitate_cue: bool = True
    """Include the cue in the loss, so that the policy learns to correct itself."""
    solution: Literal["any", "group", "task"] = "any"
    """Source of the solution: the shortest success of the group, the task's worked solution, or the first of these that
    exists."""
    count: int = Field(1, ge=1)
    """Maximum number per group."""

    @property
    def compares_completions(self) -> bool:
        return self.solution == "group"

    def __call__(self, batch: Batch) -> None:
        """Add demonstrations: prompt and attempt (masked), cue, correct solution.

        Prompt, attempt and a sibling's solution are the recorded tokens. The attempt's end-of-sequence token is
        removed, because the text continues there. Demonstrations longer than max_new_tokens after the prompt are left
        out.
        """
        for group in batch.groups().values():
            failures = [each for each in group if is_success(each, self.part, self.threshold) is False]
            found = self._solution(batch, group) if failures else None
            if found is None:
                if failures:
                    batch.note("no solution")
                continue
            made = 0
            for attempt in failures:
                if made == self.count:
                    break
                experience = self._reflected(batch, attempt, *found)
                if experience is None:
                    batch.note("too long")
                else:
                    batch.add(experience, "reflection")
                    made += 1

    def _solution(self, batch: Batch, group: Sequence[Experience]) -> tuple[IntArray, str, str] | None:
        """Tokens, text and origin of a correct solution; None if there is none."""
        if self.solution != "task":
            single = [each for each in group if sum(turn.role == "assistant" for turn in each.turns) == 1]
            good = [each for each in single if is_finished(each) and is_success(each, self.part, self.threshold)]
            if good:
                best = min(good, key=response_length)
                return best.token_ids[prompt_length(best) :], best.response, best.id
        if self.solution != "group":
            context = batch.context
            text = context.task(group[0].task_id).response
            if text is not None:
                from rollmill.data.encoding import encode_answer

                ids = encode_answer(text, group[0], context.tokenizer, context.end_id)
                return np.array(ids, np.int32), text, "task"
        return None

    def _reflected(
        self, batch: Batch, attempt: Experience, solution: IntArray, text: str, origin: str
    ) -> Experience | None:
        """Build the demonstration; None if it exceeds max_new_tokens."""
        start = prompt_length(attempt)
        tried = attempt.token_ids if attempt.stop_reason is not StopReason.EOS else attempt.token_ids[:-1]
        cue = np.array(batch.context.tokenizer.encode(self.cue, add_special_tokens=False), np.int32)
        ids = np.concatenate([tried, cue, solution]).astype(np.int32)
        if len(ids) - start > batch.context.max_new_tokens:
            return None
        imitated = len(tried) + (0 if self.imitate_cue else len(cue))
        ends = [len(tried), len(tried) + len(cue), len(ids)]
        name = f"{attempt.id}/{batch.operator}"
        return experience_from_demonstration(
            ids,
            imitated,
            id=name,
            task_id=attempt.task_id,
            group=name,
            turns=[
                Turn("prompt", 0, start, attempt.prompt),
                Turn("attempt", start, ends[0], attempt.response),
                Turn("cue", ends[0], ends[1], self.cue),
                Turn("assistant", ends[1], ends[2], text),
            ],
            prompt=attempt.prompt,
            response=attempt.response + self.cue + text,
            info={"origin": attempt.id, "origin_reward": attempt.reward, "solution": origin},
        )


def _derived(experience: Experience, *, id: str, group: str, source: ExperienceSource) -> Experience:
    """Copy a rollout as a demonstration or one of a pair: the same tokens, of which those of the policy count."""
    return Experience(
        id=id,
        task_id=experience.task_id,
        group=group,
        token_ids=experience.token_ids.copy(),
        action_mask=experience.action_mask.copy(),
        logprobs=np.zeros(len(experience.token_ids), np.float32),
        versions=np.full(len(experience.token_ids), -1, np.int32),
        source=source,
        stop_reason=experience.stop_reason,
        turns=[Turn(turn.role, turn.start, turn.end, turn.text) for turn in experience.turns],
        prompt=experience.prompt,
        response=experience.response,
        info={"origin": experience.id, "origin_reward": experience.reward, "origin_version": experience.oldest_version},
    )


def _successes(part: str | None, threshold: float, group: Sequence[Experience]) -> list[Experience]:
    """Finished, unmasked successes, in order."""
    return [each for each in group if is_finished(each) and each.action_tokens and is_success(each, part, threshold)]


def _measure(experience: Experience, part: str | None) -> float:
    value = reward_value(experience, part)
    assert value is not None
    return value
