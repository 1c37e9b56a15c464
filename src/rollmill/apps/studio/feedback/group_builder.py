"""Builds groups of experiences from feedback. Feedback on a stored completion keeps its exact tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollmill.apps.studio.feedback.requests import FeedbackError
from rollmill.buffer import ExperienceKind, Group
from rollmill.buffer.base import FEEDBACK
from rollmill.data import encode_demonstration, encoding, render_prompt
from rollmill.models.run_tokenizer import RunTokenizer
from rollmill.trackers.console import printable
from rollmill.types import Experience, ExperienceSource, Task, Turn, experience_from_demonstration


def build_rated_group(original: Experience, rating: float, id: str) -> Group:
    """Builds a group of kind `rated`: a copy of the completion with the rating as its reward."""
    experience = _copy(original, f"{id}/0", id, rating)
    experience.reward_parts = {"rating": rating}
    return _group(id, ExperienceKind.RATED, [experience])


def build_edited_group(original: Experience, text: str, encoded: list[int], id: str) -> Group:
    """Builds a demonstration in place of a completion: the same prompt tokens, then `encoded` (text and end token).

    Raises FeedbackError if the completion has several turns.
    """
    start = find_answer_start(original)
    if not original.action_mask[start:].all():
        raise FeedbackError(f"{original.id} has several turns; only a single answer to a prompt can be edited")
    token_ids = np.concatenate([original.token_ids[:start], np.array(encoded, np.int32)]).astype(np.int32)
    turns = [turn for turn in original.turns if turn.end <= start]
    return _group(
        id,
        ExperienceKind.EXPERT,
        [_demonstration(f"{id}/0", original.task_id, id, token_ids, start, turns, original.prompt, text)],
    )


def build_comparison_group(better: Experience, worse: Experience, id: str) -> Group:
    """Builds a preference pair of completions: the better one with reward 1, the worse one with 0.

    Raises FeedbackError unless both answer the same prompt, token for token, and differ.
    """
    if not np.array_equal(better.token_ids[: find_answer_start(better)], worse.token_ids[: find_answer_start(worse)]):
        raise FeedbackError(
            f"{better.id} and {worse.id} answer different prompts (tasks {better.task_id!r} and {worse.task_id!r}); "
            "compare completions of one prompt"
        )
    if np.array_equal(better.token_ids, worse.token_ids):
        raise FeedbackError(f"{better.id} and {worse.id} have the same tokens; neither is better")
    pair = [_copy(better, f"{id}/chosen", id, 1.0), _copy(worse, f"{id}/rejected", id, 0.0)]
    for experience in pair:
        experience.source = ExperienceSource.PREFERENCE
    return _group(id, ExperienceKind.PREFERENCE, pair)


def build_demonstration_group(task: Task, tokenizer: RunTokenizer, id: str) -> Group:
    """Builds a demonstration: the task's response after its prompt."""
    assert task.response is not None
    return _group(id, ExperienceKind.EXPERT, [_written(task, tokenizer, f"{id}/0", id)])


def build_preference_group(task: Task, tokenizer: RunTokenizer, id: str) -> Group:
    """Builds a preference pair of texts: the task's `response` preferred to `rejected`. Raises FeedbackError if they
    are equal."""
    assert task.response is not None
    assert task.rejected is not None
    if task.response == task.rejected:
        raise FeedbackError("chosen and rejected are the same text; neither is better")
    pair = [
        _written(task, tokenizer, f"{id}/chosen", id),
        _written(task, tokenizer, f"{id}/rejected", id, rejected=True),
    ]
    for experience, reward in zip(pair, (1.0, 0.0), strict=True):
        experience.source, experience.reward = ExperienceSource.PREFERENCE, reward
    return _group(id, ExperienceKind.PREFERENCE, pair)


def build_graded_group(task: Task, rating: float, tokenizer: RunTokenizer, id: str) -> Group:
    """Builds a rated text. It is encoded here, so log-probs are 0 and versions -1."""
    assert task.response is not None
    experience = _written(task, tokenizer, f"{id}/0", id)
    experience.source, experience.reward, experience.reward_parts = ExperienceSource.ROLLOUT, rating, {"rating": rating}
    return _group(id, ExperienceKind.RATED, [experience])


def find_answer_start(experience: Experience) -> int:
    """Returns the number of tokens before the policy's first one. Raises FeedbackError if it has produced none."""
    if not experience.action_mask.any():
        raise FeedbackError(f"{experience.id} has no tokens of the policy")
    return int(experience.action_mask.argmax())


def encode_answer(text: str, original: Experience, tokenizer: RunTokenizer) -> list[int]:
    """Encodes another answer to a completion's prompt, and its end token.

    Raises FeedbackError if the vocabulary lacks a character (which would be lost), or if the text contains the end
    token.
    """
    *ids, end_id = encoding.encode_answer(text, original, tokenizer.tokenizer, tokenizer.end_id)
    _check_known(text, ids, tokenizer.tokenizer)
    if end_id in ids:
        raise FeedbackError(_HOLDS_END)
    return [*ids, end_id]


_HOLDS_END = "the answer holds the token that ends an answer; leave it out, it is added"


def _written(task: Task, tokenizer: RunTokenizer, id: str, group: str, *, rejected: bool = False) -> Experience:
    """Builds an experience from an answer to a task, encoded like worked solutions of a taskset."""
    ids, mask = encode_demonstration(task, tokenizer.tokenizer, tokenizer.end_id, rejected=rejected)
    start = mask.index(True)
    if not start:
        raise FeedbackError("the prompt has no tokens")
    prompt, text = render_prompt(task, tokenizer.tokenizer), task.rejected if rejected else task.response
    assert text is not None
    _check_known(prompt, ids[:start], tokenizer.tokenizer)
    _check_known(text, ids[start:-1], tokenizer.tokenizer)
    if ids[-1] in ids[start:-1] or tokenizer.tokenizer.decode(ids[-1:]) in text:
        raise FeedbackError(_HOLDS_END)
    token_ids = np.array(ids, np.int32)
    return _demonstration(id, task.id, group, token_ids, start, [Turn("prompt", 0, start, prompt)], prompt, text)


def _demonstration(
    id: str, task: str, group: str, token_ids: Any, start: int, turns: list[Turn], prompt: str, text: str
) -> Experience:
    return experience_from_demonstration(
        token_ids,
        start,
        id=id,
        task_id=task,
        group=group,
        turns=[*turns, Turn("assistant", start, len(token_ids), text)],
        prompt=prompt,
        response=text,
    )


def _copy(original: Experience, id: str, group: str, reward: float) -> Experience:
    return replace(
        original, id=id, group=group, reward=reward, reward_parts={}, info=dict(original.info), advantage=None
    )


def _group(id: str, kind: ExperienceKind, experiences: list[Experience]) -> Group:
    return Group(id, experiences, kind, writer=FEEDBACK)


def _check_known(text: str, ids: Sequence[int], tokenizer: Any) -> None:
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids or unknown == tokenizer.eos_token_id:
        return
    missing = [each for each in sorted(set(text)) if unknown in tokenizer.encode(each, add_special_tokens=False)]
    named = ", ".join(printable(repr(each)) for each in missing[:5]) or "some of the text"
    raise FeedbackError(f"the tokenizer has no token for {named}; write it in another way")
