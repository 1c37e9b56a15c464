"""Scoring of responses that no run has generated: rows with a text, its task and perhaps a group.

`rollmill grade` and `rollmill.grade` use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.config.run import StageConfig
from rollmill.config.validation_errors import join_quoted
from rollmill.data.images import metadata_with_images
from rollmill.errors import ConfigError
from rollmill.rewards.base import RewardResult
from rollmill.rewards.manager import RewardManager, build_reward_manager
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.types import Completion, StopReason, Task, split_reasoning, split_reply

_CONCURRENT_ROWS = 256
Row = Mapping[str, Any]
"""A `response`, and what its task has: `prompt`, `answer`, `id`, `metadata`, `domain`, `group`; the `role` of
the response."""


def build_graders(stage: StageConfig, workers: int | None = None) -> StageRewards:
    """Build the rewards of a stage for texts without tokens. Raises like `build_reward_manager`.

    Args:
        workers: grader processes; default: the stage's.
    """

    def build(view: StageConfig) -> RewardManager:
        settings = (
            view.reward_settings if workers is None else view.reward_settings.model_copy(update={"workers": workers})
        )
        return build_reward_manager(view.rewards, settings)

    return StageRewards.build(stage, build)


def require_response(where: str, row: Row) -> None:
    """Raise ConfigError, which begins with `where`, if a row has no text to score."""
    if not isinstance(row.get("response"), str):
        what = "has no `response`" if "response" not in row else f"`response` is {type(row['response']).__name__}"
        raise ConfigError(f"{where}: {what}; every line needs the text to score as a string")


async def judge_rows(
    rewards: StageRewards, rows: Sequence[Row], tasks: Sequence[Task]
) -> tuple[dict[int, RewardResult], Exception | None]:
    """Score all rows; return the results by the position of their row, in order, and the first failure.

    Rows of the same `group` are one group for rewards that compare completions. Rows after a failure are cancelled,
    rows before it are completed.
    """
    gate = asyncio.Semaphore(_CONCURRENT_ROWS)
    groups = _groups(rows, tasks) if rewards.groupwise else {number: [number] for number in range(len(rows))}

    async def one(group: str | int, members: list[int]) -> list[RewardResult]:
        async with gate:
            completions = [
                completion_from_text(tasks[number], rows[number]["response"], index)
                for index, number in enumerate(members)
            ]
            if isinstance(group, str):
                return await rewards.score_group(tasks[members[0]], completions)
            role = rows[members[0]].get("role")
            return [await rewards.score(tasks[members[0]], completions[0], role=role)]

    running = [asyncio.create_task(one(group, members)) for group, members in groups.items()]
    failure: Exception | None = None
    found: dict[int, RewardResult] = {}
    try:
        for members, work in zip(groups.values(), running, strict=True):
            if failure is not None:
                work.cancel()
            try:
                found |= zip(members, await work, strict=True)
            except asyncio.CancelledError:
                if failure is None:
                    raise
            except Exception as error:
                failure = failure or error
    finally:
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {number: found[number] for number in sorted(found)}, failure


def _groups(rows: Sequence[Row], tasks: Sequence[Task]) -> dict[str | int, list[int]]:
    """Return the positions of the rows by their `group`; a row without one is its own group, by its position.

    Raises ConfigError if a group has several questions or answers.
    """
    groups: dict[str | int, list[int]] = {}
    for number, row in enumerate(rows):
        label = row.get("group")
        groups.setdefault(number if label is None else str(label), []).append(number)
    for group, members in groups.items():
        first = tasks[members[0]]
        for other in [tasks[number] for number in members]:
            if (other.prompt, other.answer) != (first.prompt, first.answer):
                which = join_quoted([first.id, other.id])
                raise ConfigError(
                    f"group `{group}`: {which} differ in `prompt` or `answer`; give every task a group of its own"
                )
    return groups


def row_task(number: int, row: Row, where: str, folder: Path, stage: StageConfig) -> Task:
    """Return the task of a row. Missing images keep their names: rewards that need them report the error.

    Args:
        number: position of the row, from 1: the id of a row without one.
        where: names the row in errors.
        folder: base of the paths of images.

    Raises ConfigError if the stage has domains and the row names none of them.
    """
    domain = row.get("domain")
    if stage.domains and domain not in stage.domains:
        found = "names no domain" if domain is None else f"names the domain {domain!r:.60}"
        names = join_quoted(list(stage.domains))
        raise ConfigError(f'{where}: the row {found}; the run has {names}: give it as "domain"')
    own = row.get("metadata")
    metadata = own if isinstance(own, dict) else dict(row)
    try:
        metadata = metadata_with_images(metadata, None, folder)
    except ValueError:
        metadata = {"images": metadata.get("image"), **metadata}
    return Task(
        id=str(row.get("id", number)),
        prompt=row.get("prompt", ""),
        answer=row.get("answer"),
        metadata=metadata,
        taskset=str(domain) if stage.domains else "",
    )


def completion_from_text(task: Task, text: str, index: int = 0) -> Completion:
    """Build a completion that has only text: nothing was generated, so there are no tokens."""
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    reply = split_reply(text, task.prompt) if isinstance(task.prompt, str) else split_reasoning(text)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=index, reply=reply)
