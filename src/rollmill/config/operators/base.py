"""Base classes of the operators of `pipeline`."""

from __future__ import annotations

from typing import ClassVar

from rollmill.config.rewards.base import RewardSection
from rollmill.config.section import NamedSection


class OperatorSection(NamedSection):
    """An operator chosen by name; its other keys are its options."""

    adds_to_rewards: ClassVar[bool] = False  #: shapes rewards by adding a part
    creates_experiences: ClassVar[bool] = False  #: its experiences are kept for the whole run
    drops: ClassVar[bool] = False  #: drops completions that have a reward, whatever its options
    compares: ClassVar[bool] = False  #: compares the completions of a group, whatever its options
    rewrites_rewards: ClassVar[bool] = False  #: afterwards a reward is no longer the weighted sum of its parts

    @property
    def reward_lists(self) -> list[tuple[tuple[str | int, ...], list[RewardSection]]]:
        """The operator's own lists of rewards, each with its key."""
        return []

    def reject_unused_keys(self, keys: tuple[str, ...], honoured: bool, when: str) -> None:
        """Raises ValueError if one of `keys` is set but not `honoured`."""
        for key in keys:
            if not honoured and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is honoured {when}; remove it")

    @property
    def drops_completions(self) -> bool:
        """True if the operator drops completions that have a reward, with these options."""
        return type(self).drops

    @property
    def compares_completions(self) -> bool:
        """True if the operator compares the completions of a group, with these options, so that one is no use."""
        return type(self).compares


class RewardOperatorSection(OperatorSection):
    """An operator that reads rewards."""

    part: str | None = None
    """Use this part of the reward instead of the sum: the name of a reward, or name/part of one with several."""


class SuccessOperatorSection(RewardOperatorSection):
    """An operator that distinguishes successes from failures."""

    threshold: float = 1.0
    """Minimum reward (or part) of a success."""


def reject_weighting_keys(reward: RewardSection, key: str, why: str) -> None:
    """Raises ValueError if a single reward sets keys that only matter in a weighted sum."""
    for name in ("weight", "gate", "after_steps"):
        if getattr(reward, name) != RewardSection.model_fields[name].default:
            raise ValueError(f"{key}.{name} is not honoured here: {why}; remove it")
