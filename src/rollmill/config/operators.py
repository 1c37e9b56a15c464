"""Base classes of the operators of `pipeline`, which stand in `rollmill.pipelines`: between explorer and buffer each
changes, drops or adds experiences."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.rewards import Reward
from rollmill.config.section import NamedSection
from rollmill.types import ExperienceSource

if TYPE_CHECKING:
    from rollmill.config.run import StageConfig
    from rollmill.pipelines.batch import Batch
    from rollmill.pipelines.pipeline import PipelineResources

ALL_SOURCES = frozenset(ExperienceSource)


class OperatorSection(NamedSection):
    """An operator chosen by name: its options, and the call that changes a batch.

    A stage works with a copy, so that the section of the run file stays as it was read. What an operator remembers goes
    through `state_dict` and `load_state_dict`, and one with processes or connections has `close`.
    """

    handles: ClassVar[frozenset[ExperienceSource]] = frozenset({ExperienceSource.ROLLOUT})
    """Experiences that it can act on, by origin."""
    adds_to_rewards: ClassVar[bool] = False  #: shapes rewards by adding a part
    creates_experiences: ClassVar[bool] = False  #: its experiences are kept for the whole run
    drops: ClassVar[bool] = False  #: drops completions that have a reward, whatever its options
    compares: ClassVar[bool] = False  #: compares the completions of a group, whatever its options
    rewrites_rewards: ClassVar[bool] = False  #: afterwards a reward is no longer the weighted sum of its parts

    sources: list[Literal["usual", "expert", "preference"]] | None = Field(None, min_length=1)
    """Experiences that the operator is given, by origin: `usual` (rollouts), `expert` (demonstrations) and `preference`
    (pairs and labelled completions). Default: all that it can act on."""

    def setup(self, resources: PipelineResources) -> None:
        """Make the copy of a stage ready. Raises ConfigError if it lacks a package."""

    def __call__(self, batch: Batch) -> Awaitable[None] | None:
        """Change a batch in place, and record each change with its methods."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _known_sources(self) -> Self:
        wrong = [each for each in self.sources or [] if ExperienceSource(each) not in self.handles]
        if wrong:
            able = ", ".join(each.value for each in ExperienceSource if each in self.handles)
            raise ValueError(f"sources: `{self.name}` cannot act on {', '.join(wrong)} experiences; it can on {able}")
        return self

    def arguments(self) -> dict[str, Any]:
        """Returns the options of the project's own function or class: `sources` is for its caller."""
        return {key: value for key, value in super().arguments().items() if key != "sources"}

    @property
    def taken(self) -> frozenset[ExperienceSource]:
        """Experiences that the operator is given, by origin."""
        return self.handles if self.sources is None else frozenset(map(ExperienceSource, self.sources))

    @property
    def reward_lists(self) -> list[tuple[tuple[str | int, ...], list[Reward]]]:
        """The operator's own lists of rewards, each with its key."""
        return []

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        """Yields the keys that cannot have their value in this stage, which rolls out, each with the problem and a
        remedy."""
        return iter(())

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


class CustomOperatorSection(OperatorSection):
    """An operator of a project: it decides by itself what it does with which experiences."""

    handles = ALL_SOURCES


class RewardOperatorSection(OperatorSection):
    """An operator that reads rewards."""

    part: str | None = None
    """Use this part of the reward instead of the sum: the name of a reward, or name/part of one with several."""


class SuccessOperatorSection(RewardOperatorSection):
    """An operator that distinguishes successes from failures."""

    threshold: float = 1.0
    """Minimum reward (or part) of a success."""


def reject_weighting_keys(reward: Reward, key: str, why: str) -> None:
    """Raises ValueError if a single reward sets keys that only matter in a weighted sum."""
    for name in ("weight", "gate", "after_steps"):
        if getattr(reward, name) != Reward.model_fields[name].default:
            raise ValueError(f"{key}.{name} is not honoured here: {why}; remove it")
