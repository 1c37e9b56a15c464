"""Groups for tests, and what has to be the same of two."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from rollmill.buffer.base import EXPLORER, ExperienceKind, Group
from rollmill.types import Experience, ExperienceSource, StopReason, Turn

ARRAYS = ("token_ids", "action_mask", "logprobs", "versions", "advantage", "routing")


def experience(name: str = "g/0", *, version: int = 0, tokens: int = 6, reward: float | None = 1.0) -> Experience:
    """Two tokens of a prompt, then those of the policy at `version`."""
    own = np.arange(tokens) >= 2
    return Experience(
        id=name,
        task_id=f"task of {name}",
        group=name.partition("/")[0],
        token_ids=np.arange(tokens, dtype=np.int32),
        action_mask=own,
        logprobs=np.where(own, -0.5, 0).astype(np.float32),
        versions=np.where(own, version, -1).astype(np.int32),
        reward=reward,
        prompt="1+1=",
        response="2",
        turns=[Turn("prompt", 0, 2, "1+1="), Turn("assistant", 2, tokens, "2")],
    )


def group(
    name: str,
    *,
    version: int = 0,
    kind: ExperienceKind = ExperienceKind.ROLLOUT,
    writer: str = EXPLORER,
    priority: float = 1.0,
    rewards: tuple[float | None, ...] = (1.0, 0.0),
) -> Group:
    """A group with one experience per reward."""
    inside = [experience(f"{name}/{i}", version=version, reward=reward) for i, reward in enumerate(rewards)]
    return Group(name, inside, kind, priority, writer, created_at=1.5)


def awkward() -> Experience:
    """An experience with everything that a store may lose or change."""
    nan = np.frombuffer(np.array([0x7FC01234, 0xFF800001], "<u4").tobytes(), "<f4")  # NaNs with a payload
    floats = np.concatenate([nan, np.array([np.inf, -np.inf, -0.0, 1e-45, 0.1, np.float32(np.pi)], np.float32)])
    return Experience(
        id="odd/0",
        task_id="täsk \0 \ud800",
        group="odd",
        token_ids=np.array([0, 2**31 - 1, -(2**31), 1, 2, 3, 4, 5], np.int32),
        action_mask=np.array([0, 1, 1, 0, 1, 0, 0, 1], bool),
        logprobs=floats.astype(np.float32),
        versions=np.array([-1, 3, 4, -1, 4, -1, -1, 2**31 - 1], np.int32),
        reward=float("nan"),
        reward_parts={"math": -0.0, "judge": None, "code": float("inf")},
        source=ExperienceSource.EXPERT,
        stop_reason=StopReason.ABORTED,
        temperature=0.7000000000000001,
        turns=[Turn("user", 0, 1, "\0"), Turn("tool", 1, 3, "\ud83d"), Turn("assistant", 3, 8, "\x1b[31mred")],
        prompt="\0 and \ud800",
        response="\x1b[31mred",
        timings={"queue": 1e-300},
        info={"nested": {"list": [1, 2.5, None, True, "x"]}, "nan": float("nan"), "big": 2**70},
        advantage=floats[::-1].astype(np.float32),
        routing=np.array([[[0, 511]], [[256, 3]], [[65535, 1]]], np.uint16),
    )


def same(one: Experience, other: Experience) -> bool:
    """Whether two experiences are equal, bit for bit."""
    for name in ARRAYS:
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None) or (a is not None and (a.dtype != b.dtype or a.tobytes() != b.tobytes())):
            return False
    rest = [field.name for field in fields(Experience) if field.name not in ARRAYS]
    return all(_text(getattr(one, name)) == _text(getattr(other, name)) for name in rest)


def same_groups(one: list[Group], other: list[Group]) -> bool:
    """Whether two lists of groups are equal, bit for bit."""
    rest = [field.name for field in fields(Group) if field.name != "experiences"]
    return len(one) == len(other) and all(
        all(_text(getattr(a, name)) == _text(getattr(b, name)) for name in rest)
        and len(a.experiences) == len(b.experiences)
        and all(map(same, a.experiences, b.experiences))
        for a, b in zip(one, other, strict=True)
    )


def ids(groups: list[Group]) -> list[str]:
    """Names of groups."""
    return [each.id for each in groups]


def _text(value: Any) -> str:
    return repr(value)  # tells -0.0 from 0.0, and NaN is like itself
