"""`taskset`: one data source or a mix of several, operators that prepare the tasks, and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

from pydantic import Field, TypeAdapter, field_validator, model_validator

from rollmill.config.components import SamplerConfig, TaskOperatorConfig
from rollmill.config.rows import FieldsConfig, GeneratorConfig, Preset, RowsSection
from rollmill.config.section import PlainName, merge_with_default

__all__ = ["FieldsConfig", "GeneratorConfig", "MixEntry", "Preset", "RowsSection", "TasksetConfig", "TasksetSection"]

_OF_THE_WHOLE = {"pipeline", "on_bad_row", "mix"}
"""Keys of a taskset with `mix` itself; all others belong in its entries."""


class TasksetSection(RowsSection):
    """Tasks of one data source, prepared, and how they are sampled."""

    pipeline: list[TaskOperatorConfig] = []
    """Operators that clean, drop, rate or sort the tasks when they are loaded, in order."""
    sampler: SamplerConfig = TypeAdapter(SamplerConfig).validate_python("shuffled")
    """Sampler, which decides which tasks come next: a name, or a section with `name` and options."""

    @field_validator("sampler", mode="before")
    @classmethod
    def _sampler_in_full(cls, value: Any) -> Any:
        return merge_with_default(cls.model_fields["sampler"].default, value)

    @field_validator("pipeline", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"name": each} if isinstance(each, str) else each for each in value]


class MixEntry(TasksetSection):
    """One taskset of a mix: all keys of a taskset but `mix`, and these."""

    name: PlainName
    """Name of the taskset: prefix of its task ids, and part of metric names."""
    weight: float = Field(1.0, gt=0)
    """Relative sampling weight of the taskset."""


class TasksetConfig(TasksetSection):
    """A taskset."""

    mix: list[MixEntry] = []
    """Tasksets to sample from in proportion to their weights, each with a sampler of its own, instead of one source."""

    def parts(self) -> list[TasksetSection]:
        """Returns the entries of a mix, or the taskset itself."""
        return [*self.mix] or [self]

    @property
    def names_workflows(self) -> bool:
        """True if rows may name their workflow."""
        return any(part.fields.workflow is not None for part in self.parts())

    def sources(self) -> list[str]:
        return [*super().sources(), *(["mix"] if self.mix else [])]

    def _choices(self) -> str:
        return "path, generator, function, harbor and mix"

    @model_validator(mode="after")
    def _entries_say_the_rest(self) -> Self:
        if not self.mix:
            return self
        names = [entry.name for entry in self.mix]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two entries of mix are called `{twice[0]}`; rename one of them")
        for key, field in type(self).model_fields.items():
            if key not in _OF_THE_WHOLE and getattr(self, key) != field.default:
                raise ValueError(f"{key} is not honoured beside mix; write it in the entries of mix")
        return self


TasksetT = TypeVar("TasksetT", bound=TasksetSection)


def fill_decontamination_sets(taskset: TasksetConfig, evaluation: Sequence[TasksetConfig]) -> TasksetConfig:
    """Returns the training taskset with `against` of every `decontaminate` operator filled in from the stage's held-out
    tasks, unless the run file sets it; the same object if none lacks it."""
    if not any(any(each.lacks_held_out for each in part.pipeline) for part in [taskset, *taskset.mix]):
        return taskset
    keys = set(RowsSection.model_fields)
    rows = [RowsSection.model_validate(part.model_dump(include=keys)) for held in evaluation for part in held.parts()]
    return _filled(taskset, rows).model_copy(update={"mix": [_filled(entry, rows) for entry in taskset.mix]})


def _filled(section: TasksetT, rows: list[RowsSection]) -> TasksetT:
    pipeline = [each.model_copy(update={"against": rows}) if each.lacks_held_out else each for each in section.pipeline]
    return section.model_copy(update={"pipeline": pipeline})
