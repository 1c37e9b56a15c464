"""Nim with one heap: a move takes one, two or three stones, and who takes the last stone wins.

11>3      a position of the game, and a move: three of eleven stones

Perfect play leaves a multiple of four, so a heap that is none is won for the player to move, and by one move only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import rollmill
from rollmill.rollout.policy import Policy
from rollmill.types import Task

MOST = 3  # stones of a move


def heaps(largest: int) -> Iterator[dict[str, Any]]:
    """Tasks to play from: every heap from 1 to `largest` stones, won or lost."""
    for stones in range(1, largest + 1):
        yield {"prompt": f"{stones}>"}


def won_heaps(largest: int) -> Iterator[dict[str, Any]]:
    """Tasks of the evaluation: every heap that is won for the player to move, with its only perfect move."""
    for stones in range(1, largest + 1):
        if best := stones % (MOST + 1):
            yield {"prompt": f"{stones}>", "answer": str(best)}


@rollmill.workflow
async def nim(task: Task, policy: Policy, opponent: Policy, *, legal: float = 0.2) -> dict[str, float]:
    """Play a game; the policy moves first. A move that is not allowed loses it.

    The reward is 1 for a won game, and `legal` if all moves of the policy were allowed.
    """
    stones, mover, other = int(str(task.prompt).removesuffix(">")), policy, opponent
    while stones:
        taken = await _move(mover, stones)
        if not taken:
            break
        stones -= taken
        mover, other = other, mover
    won = other is policy  # the last stone was the policy's, or the opponent's move was not allowed
    policy.log(**{"won_from_past" if opponent.copied_at is not None else "won_from_itself": won})
    return {"won": float(won), "legal": legal * (won or stones == 0)}


async def _move(player: Policy, stones: int) -> int:
    """Number of stones that a player takes; 0 if its move is not allowed."""
    text = (await player.complete(f"{stones}>", max_new_tokens=1)).text
    return int(text) if text in ("1", "2", "3") and int(text) <= stones else 0
