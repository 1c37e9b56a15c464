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


def moves(largest: int) -> Iterator[dict[str, Any]]:
    """Demonstrations of the rules: every move that is allowed, good or bad."""
    for stones in range(1, largest + 1):
        for taken in range(1, min(MOST, stones) + 1):
            yield {"prompt": f"{stones}>", "response": str(taken)}


def won_heaps(largest: int) -> Iterator[dict[str, Any]]:
    """Tasks of the evaluation: every heap that is won for the player to move, with its only perfect move."""
    for stones in range(1, largest + 1):
        if best := stones % (MOST + 1):
            yield {"prompt": f"{stones}>", "answer": str(best)}


@rollmill.workflow
async def nim(task: Task, policy: Policy, opponent: Policy) -> dict[str, float]:
    """Play a game, in which a move that is not allowed loses. The policy moves first.

    It also moves second where the opponent is the policy itself, and learns from both sides then. Of each side it
    learns the first move: the outcome of later ones is learned from smaller heaps.
    """
    is_self_play = opponent.copied_at is None
    players = {"first": policy.role("first"), "second": policy.role("second") if is_self_play else opponent}
    stones, mover, waiting = int(str(task.prompt).removesuffix(">")), "first", "second"
    learning = set(players)
    while stones and (taken := await _move(players[mover], stones, learn=mover in learning)):
        stones -= taken
        learning.discard(mover)
        mover, waiting = waiting, mover
    if not is_self_play:
        policy.log(won_from_past=waiting == "first")
    return {waiting: 1.0, mover: 0.0}  # who waits now took the last stone, or the other's move was not allowed


async def _move(player: Policy, stones: int, *, learn: bool) -> int:
    """Number of stones that a player takes; 0 if its move is not allowed."""
    text = (await player.complete(f"{stones}>", max_new_tokens=1, learn=learn)).text
    return int(text) if text in ("1", "2", "3") and int(text) <= stones else 0
