"""Runs that a test paces, whichever of their processes is faster: they stand still after a step, and a token budget
cuts their groups in every step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

BATCH = 4
SEQUENTIAL = {"sampler": "sequential"}
"""Tasks in their order, so that a group and its task have the same number."""

_HOLDING = """
import asyncio
import math
from dataclasses import replace
from pathlib import Path

FOLDER = Path(__file__).parent


def is_held(number):
    try:
        return number >= int((FOLDER / "hold").read_text())
    except FileNotFoundError:
        return False
"""

_REWARD = (
    _HOLDING
    + '''

async def held(task, completion):
    """One for a completion with a 1, as soon as the task is not held."""
    number = int(task.id.rpartition(":")[2])
    (FOLDER / f"asked-{number}").touch()
    await asyncio.sleep(0.03)
    while is_held(number):
        await asyncio.sleep(0.01)
    return float("1" in completion.text)
'''
)

_CUTTING = (
    _HOLDING
    + '''
from rollmill.rollout.base import PartialRollout
from rollmill.rollout.explorer import Explorer
from rollmill.types import StopReason

TOKENS = 3
part = Explorer.part


def interrupts(engine):
    """How often the engine was interrupted since the first call."""
    if not hasattr(engine, "interrupts"):
        engine.interrupts, interrupt = 0, engine.interrupt

        def counted():
            engine.interrupts += 1
            interrupt()

        engine.interrupt = counted
    return engine.interrupts


def awaited(number):
    """Groups that the step which needs this one starts, for the first of its batch."""
    first = number + 2 * BATCH if number else BATCH
    return range(first, min(number + 3 * BATCH, GROUPS)) if number % BATCH == 0 else ()


async def cut(self, task, sampling, *, n, seed, group, begun=()):
    """Cut a group that is not needed yet: with a few tokens it waits for an interruption. A step's first group waits
    until those that the step starts have such tokens, and those that are held wait, too."""
    number, before = int(group.rpartition("-")[2]), interrupts(self._engine)
    mark = FOLDER / f"begun-{number}"
    if number >= BATCH and not begun:
        few = sampling.model_copy(update={"max_new_tokens": TOKENS})
        found = await part(self, task, few, n=n, seed=seed, group=group)
        mark.touch()
        if any(each.stop_reason is StopReason.LENGTH for each in found.experiences):
            while interrupts(self._engine) == before:
                await asyncio.sleep(0.01)
        return PartialRollout(*([aborted(each) for each in of] for of in (found.experiences, found.completions)))
    mark.touch()
    while is_held(number) or not all((FOLDER / f"begun-{each}").exists() for each in awaited(number)):
        if interrupts(self._engine) != before:
            return PartialRollout(list(begun))
        await asyncio.sleep(0.01)
    return await part(self, task, sampling, n=n, seed=seed, group=group, begun=begun)


def aborted(each):
    return replace(each, stop_reason=StopReason.ABORTED) if each.stop_reason is StopReason.LENGTH else each


Explorer.part = cut
'''
)


HELD: dict[str, Any] = {"name": "python", "function": "held.py:held", "time_limit_s": 300}
"""A reward that waits where the run is held; needs SEQUENTIAL. Not with CUT, whose steps wait for rewards of groups
that they do not need."""

CUT: dict[str, Any] = {"plugins": ["cutting.py"], "max_staleness": 2, "rollout": {"token_budget": 16}}
"""Keys of a run in which every group but those of the first step is cut, by the run's own interruption, with a few
tokens of the version that has started it; and whose groups wait where the run is held. The first step starts the groups
of three steps, every later one those of one more. The budget is what the completions of new groups have at least, so a
step ends although they wait."""


def write_paced(folder: Path, *, steps: int = 0) -> None:
    """Write the files that HELD and CUT name, for a run of so many steps."""
    (folder / "held.py").write_text(_REWARD)
    (folder / "cutting.py").write_text(f"BATCH, GROUPS = {BATCH}, {BATCH * steps}\n{_CUTTING}")


def hold(folder: Path, *, after: int) -> None:
    """Let the run make no more than `after` steps: its later groups wait."""
    new = folder / "hold.new"
    new.write_text(str(after * BATCH))
    os.replace(new, folder / "hold")


def release(folder: Path) -> None:
    """Let the run go on to its end."""
    (folder / "hold").unlink()


def asked(folder: Path, *, step: int) -> bool:
    """True if all groups of a step have completions; their rewards may be held."""
    return all((folder / f"asked-{number}").exists() for number in _groups(step))


def begun(folder: Path, *, step: int) -> bool:
    """True if all groups of a step have been cut, or are about to be."""
    return all((folder / f"begun-{number}").exists() for number in _groups(step))


def forget_begun(folder: Path) -> None:
    """Make groups wait for each other again, in a trainer that repeats a step."""
    for path in folder.glob("begun-*"):
        path.unlink()


def _groups(step: int) -> range:
    return range((step - 1) * BATCH, step * BATCH)
