"""What operators of `pipeline` have in common."""

from __future__ import annotations

from typing import ClassVar

from rollmill.config.rewards import RewardSection
from rollmill.config.section import NamedSection


class OperatorSection(NamedSection):
    """An operator chosen by name; its other keys are its options."""

    adds_to_rewards: ClassVar[bool] = False  #: shapes rewards: what it adds is a part of its own
    creates_experiences: ClassVar[bool] = False  #: what it makes is kept for as long as the run
    rewrites_rewards: ClassVar[bool] = False  #: afterwards a reward is no longer the weighted sum of its parts

    @property
    def reward_lists(self) -> list[tuple[tuple[str | int, ...], list[RewardSection]]]:
        """The lists of rewards that it judges by, each with the key it stands under."""
        return []

    def reject_unused_keys(self, keys: tuple[str, ...], honoured: bool, when: str) -> None:
        """Raises ValueError where one of `keys` is not its default and is not honoured."""
        for key in keys:
            if not honoured and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is honoured {when}; remove it")


class RewardOperatorSection(OperatorSection):
    """An operator that looks at rewards."""

    part: str | None = None
    """Look at this part of the reward instead of the sum: the name of a reward, or name/part of one with several."""


class SuccessOperatorSection(RewardOperatorSection):
    """An operator that tells successes from failures."""

    threshold: float = 1.0
    """A completion is a success when its reward (or the part) is at least this."""


def reject_weighting_keys(reward: RewardSection, key: str, why: str) -> None:
    """Raises ValueError where a reward that stands alone has keys that say how it counts among others."""
    for name in ("weight", "gate", "after_steps"):
        if getattr(reward, name) != RewardSection.model_fields[name].default:
            raise ValueError(f"{key}.{name} is not honoured here: {why}; remove it")
