"""Operators that make new experiences from rollouts: demonstrations, preference pairs and reflections.

They reuse the tokens that the policy produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.config.operators.synthesis import DemonstrationOperator, PreferencePairOperator, ReflectionOperator
from rollmill.data.encoding import encode_answer
from rollmill.pipelines.batch import Batch, is_finished, is_success, prompt_length, response_length, reward_value
from rollmill.pipelines.deduplication import LRUCache
from rollmill.pipelines.pipeline import Operator
from rollmill.types import (
    Experience,
    ExperienceSource,
    IntArray,
    StopReason,
    Turn,
    experience_from_demonstration,
    split_by_role,
)


class DemonstrationMaker:
    """Makes demonstrations of a group's finished successes."""

    def __init__(self, options: DemonstrationOperator) -> None:
        self._options = options
        self._made: LRUCache[int] = LRUCache(options.memory)

    def __call__(self, batch: Batch) -> None:
        for group in batch.groups().values():
            for experience in self._chosen(group):
                batch.add(rollout_as_demonstration(experience, batch.operator), "demonstration")

    def _chosen(self, group: Sequence[Experience]) -> list[Experience]:
        options, task = self._options, group[0].task_id
        found = _successes(options.part, options.threshold, group)
        if options.choose == "shortest":
            found.sort(key=lambda each: (response_length(each), -_measure(each, options.part)))
        elif options.choose == "best":
            found.sort(key=lambda each: (-_measure(each, options.part), response_length(each)))
        found = found[: options.count]
        if options.per_task is not None and found:
            made = self._made.get(task) or 0
            found = found[: max(options.per_task - made, 0)]
            self._made.put(task, made + len(found))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Number of demonstrations of each task, least recently used task first."""
        return {"made": [list(each) for each in self._made.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._made = LRUCache(self._options.memory)
        for task, made in state["made"]:
            self._made.put(task, made)


def preference_pairs(options: PreferencePairOperator) -> Operator:
    """Makes preference pairs of a group's completions; the chosen one has reward 1, the rejected one 0."""

    def apply(batch: Batch) -> None:
        for name, group in batch.groups().items():
            choose = _by_reward if options.by == "reward" else _by_length
            found = [pair for own in split_by_role(group) for pair in choose(options, own)]
            for number, pair in enumerate(found[: options.count]):
                of = f"{name}/{batch.operator}/{number}"
                for role, reward, experience in zip(("chosen", "rejected"), (1.0, 0.0), pair, strict=True):
                    made = _derived(experience, id=f"{of}/{role}", group=of, source=ExperienceSource.PREFERENCE)
                    made.reward = reward
                    batch.add(made, "pair" if reward else "rejected of a pair")

    return apply


def _by_reward(options: PreferencePairOperator, group: Sequence[Experience]) -> list[tuple[Experience, Experience]]:
    """Pair the best with the worst, the second best with the second worst, and so on, while rewards differ enough."""
    known = [each for each in group if each.action_tokens and reward_value(each, options.part) is not None]
    order = sorted(known, key=lambda each: -_measure(each, options.part))
    couples = zip(order[: len(order) // 2], reversed(order), strict=False)
    return [
        (best, worst)
        for best, worst in couples
        if is_finished(best) and _measure(best, options.part) - _measure(worst, options.part) > options.margin
    ]


def _by_length(options: PreferencePairOperator, group: Sequence[Experience]) -> list[tuple[Experience, Experience]]:
    """Pair by length (Kimi k1.5, arXiv:2501.12599, 2.4).

    The shortest success is preferred to each longer failure and to each success of at least `longer` times its length,
    longest first.
    """
    successes = _successes(options.part, options.threshold, group)
    if not successes:
        return []
    best = min(successes, key=response_length)
    rejected = []
    for each in group:
        success = is_success(each, options.part, options.threshold)
        least = options.longer * response_length(best) if success else response_length(best) + 1
        if success is not None and each is not best and each.action_tokens and response_length(each) >= least:
            rejected.append(each)
    return [(best, each) for each in sorted(rejected, key=response_length, reverse=True)]


def rollout_as_demonstration(experience: Experience, operator: str) -> Experience:
    """Convert a rollout to a demonstration: the same tokens, of which those of the policy are imitated."""
    name = f"{experience.id}/{operator}"
    return _derived(experience, id=name, group=name, source=ExperienceSource.EXPERT)


def _derived(experience: Experience, *, id: str, group: str, source: ExperienceSource) -> Experience:
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


def reflection(options: ReflectionOperator) -> Operator:
    """Adds demonstrations from failed attempts: prompt and attempt (masked), cue, correct solution.

    Prompt, attempt and a sibling's solution are the recorded tokens. The attempt's end-of-sequence token is removed,
    because the text continues there. Demonstrations longer than max_new_tokens after the prompt are left out.
    """

    def apply(batch: Batch) -> None:
        for group in batch.groups().values():
            failures = [each for each in group if is_success(each, options.part, options.threshold) is False]
            found = _solution(options, batch, group) if failures else None
            if found is None:
                if failures:
                    batch.note("no solution")
                continue
            made = 0
            for attempt in failures:
                if made == options.count:
                    break
                experience = _reflected(options, batch, attempt, *found)
                if experience is None:
                    batch.note("too long")
                else:
                    batch.add(experience, "reflection")
                    made += 1

    return apply


def _solution(
    options: ReflectionOperator, batch: Batch, group: Sequence[Experience]
) -> tuple[IntArray, str, str] | None:
    """Tokens, text and origin of a correct solution; None if there is none."""
    if options.solution != "task":
        single = [each for each in group if sum(turn.role == "assistant" for turn in each.turns) == 1]
        good = [each for each in single if is_finished(each) and is_success(each, options.part, options.threshold)]
        if good:
            best = min(good, key=response_length)
            return best.token_ids[prompt_length(best) :], best.response, best.id
    if options.solution != "group":
        context = batch.context
        text = context.task(group[0].task_id).response
        if text is not None:
            ids = encode_answer(text, group[0], context.tokenizer, context.end_id)
            return np.array(ids, np.int32), text, "task"
    return None


def _reflected(
    options: ReflectionOperator, batch: Batch, attempt: Experience, solution: IntArray, text: str, origin: str
) -> Experience | None:
    """Build the demonstration; None if it exceeds max_new_tokens."""
    start = prompt_length(attempt)
    tried = attempt.token_ids if attempt.stop_reason is not StopReason.EOS else attempt.token_ids[:-1]
    cue = np.array(batch.context.tokenizer.encode(options.cue, add_special_tokens=False), np.int32)
    ids = np.concatenate([tried, cue, solution]).astype(np.int32)
    if len(ids) - start > batch.context.max_new_tokens:
        return None
    imitated = len(tried) + (0 if options.imitate_cue else len(cue))
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
            Turn("cue", ends[0], ends[1], options.cue),
            Turn("assistant", ends[1], ends[2], text),
        ],
        prompt=attempt.prompt,
        response=attempt.response + options.cue + text,
        info={"origin": attempt.id, "origin_reward": attempt.reward, "solution": origin},
    )
