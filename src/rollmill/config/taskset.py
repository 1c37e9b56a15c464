"""`taskset`: rows of one source or a mix of several, operators that prepare the tasks, and their order."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rollmill.config.order import OrderConfig, ShuffledOrder
from rollmill.config.parts import merge_with_default
from rollmill.config.rows import FieldsConfig, GeneratorConfig, Preset, RowsSection
from rollmill.config.section import PlainName
from rollmill.config.task_operators import TaskOperatorConfig

__all__ = ["FieldsConfig", "GeneratorConfig", "MixEntry", "Preset", "RowsSection", "TasksetConfig", "TasksetSection"]

_OF_THE_WHOLE = {"pipeline", "on_bad_row", "mix"}
"""Keys that a taskset with `mix` honours itself; all others stand in its entries."""


class TasksetSection(RowsSection):
    """Rows of one source, prepared and in order."""

    pipeline: list[TaskOperatorConfig] = []
    """Operators that clean, leave out, rate or sort the tasks when they are loaded, one after the other."""
    order: OrderConfig = ShuffledOrder()
    """In which order tasks are handed out: a name, or a section with `name` and options."""

    @field_validator("order", mode="before")
    @classmethod
    def _order_in_full(cls, value: Any) -> Any:
        return merge_with_default(cls.model_fields["order"].default, value)

    @field_validator("pipeline", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"name": each} if isinstance(each, str) else each for each in value]


class MixEntry(TasksetSection):
    """One of several tasksets that are drawn from in turn; all keys of a taskset but `mix`, and these."""

    name: PlainName
    """What the set is called: ids of its tasks begin with it, and metrics name it."""
    weight: float = Field(1.0, gt=0)
    """Its share of what is drawn, in proportion to the others' weights."""


class TasksetConfig(TasksetSection):
    """A taskset."""

    mix: list[MixEntry] = []
    """Instead of one source: tasksets that are drawn from in proportion to their weights, each in its own order."""

    def parts(self) -> list[TasksetSection]:
        """The entries of a mix, else the taskset itself."""
        return [*self.mix] or [self]

    def sources(self) -> list[str]:
        """See `RowsSection`."""
        return [*super().sources(), *(["mix"] if self.mix else [])]

    def _choices(self) -> str:
        return "path, generator, function and mix"

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
