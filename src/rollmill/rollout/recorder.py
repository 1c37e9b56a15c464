"""Records the policy's calls in one rollout, and builds experiences with exactly its tokens.

Calls form a tree: a call whose prompt begins with all tokens of an earlier call continues it. Every path from a root to
a leaf is an experience; a completion shared by several paths counts in the loss of the first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rollmill.data.picture_turns import PictureTurn, describe_turns
from rollmill.progress import Progress, count_progress
from rollmill.types import (
    Completion,
    Experience,
    IntArray,
    RoutingArray,
    StopReason,
    Turn,
    draft_spans,
    reply_info,
)

DecodeTokens = Callable[[Sequence[int]], str]

REPETITION_KEY = "repeats"
"""Key of `info` of experiences with a completion that ended by repetition."""


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One completion of the policy."""

    completion: Completion
    prompt: str  #: as text
    temperature: float
    learned: bool  #: counts in the loss
    step: int  #: number of the step, for rewards by step
    role: str | None = None  #: role in which the policy made it
    reward: float | None = None  #: reward of branches through it, instead of the rollout's
    turns: tuple[PictureTurn, ...] | None = None  #: pieces of the prompt with pictures; None: the model does not see
    token_ids: IntArray = field(init=False)  #: prompt and completion

    def __post_init__(self) -> None:
        self.token_ids = np.concatenate([self.completion.prompt_ids, self.completion.token_ids]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """End of a step: its reward, and the state in which it was taken (steps with equal states are compared)."""

    reward: float | None
    anchor: str | None


class Recorder:
    """The calls of one rollout, in order. Not thread-safe."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.steps: list[RecordedStep] = []
        self.numbers: dict[str, float] = {}  #: numbers to log

    def add(
        self,
        completion: Completion,
        prompt: str,
        temperature: float,
        *,
        learned: bool = True,
        role: str | None = None,
        turns: tuple[PictureTurn, ...] | None = None,
    ) -> RecordedCall:
        count_progress(Progress.TOKENS)
        call = RecordedCall(completion, prompt, temperature or 1.0, learned, len(self.steps), role, turns=turns)
        self.calls.append(call)
        return call

    def end_step(self, reward: float | None, anchor: str | None) -> None:
        """End a step: later calls belong to the next one, in a separate experience."""
        self.steps.append(RecordedStep(reward, anchor))

    def experiences(self, *, id: str, task_id: str, group: str, decode: DecodeTokens) -> list[Experience]:
        """Build one experience per path of the tree, in the order of their last calls; none without calls.

        The experiences of each role are an episode of their own.

        Args:
            id: id of the rollout and its first experience, and prefix of the others' ids.
            decode: decodes tokens that the policy did not write.
        """
        parents = self._parents()
        inner = set(parents)
        counted: set[int] = set()
        made: list[Experience] = []
        steps: list[int] = []
        for leaf in range(len(self.calls)):
            if leaf in inner:
                continue
            path = [leaf]
            while (parent := parents[path[0]]) is not None:
                path.insert(0, parent)
            name = id if not made else f"{id}.{len(made)}"
            new = [call for call in path if call not in counted]
            counted.update(new)
            made.append(self._experience(path, set(new), name, task_id, group, decode))
            steps.append(self.calls[leaf].step)
        if len(made) > 1 or self.steps:
            for number, experience in enumerate(made):
                alone = experience.reward is not None
                shared = id if experience.role is None else f"{id}@{experience.role}"
                experience.episode = f"{id}.{number}" if alone else shared
                experience.info["branch"] = number
        self._set_step_info(made, steps)
        return made

    def _set_step_info(self, made: Sequence[Experience], steps: Sequence[int]) -> None:
        """Set step rewards and anchors in experiences; `steps` are their step numbers.

        A step's reward belongs to its last experience; that of a step without any to the one before.
        """
        for experience, number in zip(made, steps, strict=True):
            if self.steps:
                experience.step_reward = 0.0
            if number < len(self.steps) and (anchor := self.steps[number].anchor) is not None:
                experience.anchor = anchor
        shared = [at for at, experience in enumerate(made) if experience.reward is None]
        begun = [steps[at] for at in shared]
        for number, step in enumerate(self.steps):
            if shared and step.reward is not None:
                last = shared[max(bisect_right(begun, number) - 1, 0)]
                made[last].step_reward = (made[last].step_reward or 0.0) + step.reward

    def _parents(self) -> list[int | None]:
        """For each call, the longest earlier call that it continues, the latest of equal ones."""
        found: list[int | None] = []
        lengths = np.array([len(call.token_ids) for call in self.calls], np.int64)
        ends = np.array([call.token_ids[-1] for call in self.calls], np.int64)
        for number, call in enumerate(self.calls):
            prompt = call.completion.prompt_ids
            fitting = np.flatnonzero(lengths[:number] <= len(prompt))
            fitting = fitting[prompt[lengths[fitting] - 1] == ends[fitting]]  # few remain to be compared in full
            order = fitting[np.lexsort((fitting, lengths[fitting]))][::-1].tolist()
            found.append(next((earlier for earlier in order if self._goes_on(call, self.calls[earlier])), None))
        return found

    @staticmethod
    def _goes_on(call: RecordedCall, earlier: RecordedCall) -> bool:
        """True if both can be one sequence: same temperature, step and role, and a prefix of the same tokens and
        pictures."""
        before, prompt = earlier.token_ids, call.completion.prompt_ids
        seen = tuple(turn for turn in call.turns or () if turn.start < len(before))
        if seen != (earlier.turns or ()):
            return False
        if (call.step, call.role) != (earlier.step, earlier.role) or call.temperature != earlier.temperature:
            return False
        return bool(np.array_equal(prompt[: len(before)], before))

    def _experience(
        self, path: list[int], new: set[int], id: str, task_id: str, group: str, decode: DecodeTokens
    ) -> Experience:
        calls = [self.calls[number] for number in path]
        first, last = calls[0], calls[-1]
        length = len(last.token_ids)
        mask, logprobs = np.zeros(length, bool), np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        turns: list[Turn] = [Turn("prompt", 0, len(first.completion.prompt_ids), first.prompt)]
        for number, call in zip(path, calls, strict=True):
            start, end = len(call.completion.prompt_ids), len(call.token_ids)
            if number in new and call.learned:
                mask[start:end] = True
                logprobs[start:end] = call.completion.logprobs + call.completion.kept_logmass
                versions[start:end] = call.completion.versions
            if turns[-1].end < start:
                at = turns[-1].end
                turns.append(Turn("observation", at, start, decode(last.token_ids[at:start].tolist())))
            turns.append(Turn("assistant", start, end, call.completion.text))
        drafted = draft_spans((len(call.completion.prompt_ids), call.completion.drafted) for call in calls)
        repeated = any(call.learned and call.completion.stop_reason is StopReason.REPETITION for call in calls)
        return Experience(
            id=id,
            task_id=task_id,
            group=group,
            token_ids=last.token_ids,
            action_mask=mask,
            logprobs=logprobs,
            versions=versions,
            stop_reason=last.completion.stop_reason,
            temperature=first.temperature,
            turns=turns,
            prompt=first.prompt,
            response=last.completion.text,
            reward=next((call.reward for call in reversed(calls) if call.reward is not None), None),
            timings=_timings([call.completion for call in calls]),
            role=last.role,
            info=({REPETITION_KEY: True} if repeated else {})
            | ({} if last.turns is None else describe_turns(last.turns))
            | reply_info(last.completion, first.prompt)
            | drafted,
            routing=_routing([call.completion for call in calls]),
        )


def _routing(completions: Sequence[Completion]) -> RoutingArray | None:
    """Experts of a path's tokens: each token's from the first call that it was fed in, which is the call that gave the
    next token's log-prob; up to the first call without any."""
    known: list[RoutingArray] = []
    covered = 0
    for each in completions:
        if each.routing is None:
            break
        known.append(each.routing[covered:])
        covered = len(each.routing)
    return np.concatenate(known) if known else None


def _timings(completions: Sequence[Completion]) -> dict[str, float]:
    """Seconds in the engine's queue, in generation, and between calls: in tools, environments and the workflow."""
    between = (max(after.submitted_at - before.finished_at, 0.0) for before, after in pairwise(completions))
    return {
        "queue": sum(each.started_at - each.submitted_at for each in completions),
        "generate": sum(each.finished_at - each.started_at for each in completions),
        "between": sum(between),
    }
