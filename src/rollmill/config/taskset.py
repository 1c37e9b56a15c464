"""`taskset`: one data source or a mix of several, operators that prepare the tasks, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import regex
from pydantic import Field, SerializeAsAny, WrapValidator, field_validator, model_validator

from rollmill.config.order import OrderConfig, ShuffledOrder
from rollmill.config.rows import FieldsConfig, GeneratorConfig, Preset, RowsSection
from rollmill.config.section import NamedSection, PlainName, RegisteredUnion, merge_with_default

# Task operators

TextField = Literal["prompt", "answer", "response", "rejected"]


class TaskOperatorSection(NamedSection):
    """An operator chosen by name; its other keys are its options."""


class CleanTasks(TaskOperatorSection):
    """Normalises texts. Drops tasks whose prompt is empty afterwards."""

    name: Literal["clean"] = "clean"
    fields: list[TextField] = Field(["prompt", "answer", "response", "rejected"], min_length=1)
    """Fields to clean; answers that are not text are left unchanged."""
    unicode: Literal["NFC", "NFKC"] | None = "NFC"
    """Unicode normal form. NFKC also replaces full-width letters, ligatures and superscripts (x² becomes x2)."""
    control: bool = True
    """Remove control characters, zero-width spaces, soft hyphens and marks of writing direction."""
    whitespace: Literal["lines", "all"] | None = "lines"
    """`lines`: one kind of line end and of space, no trailing spaces. `all`: also no indentation, no runs of spaces or
    blank lines, and none around the text; not suitable for code."""
    html: bool = False
    """Decode HTML entities such as `&lt;`."""


class FilterTasks(TaskOperatorSection):
    """Keeps tasks whose field meets all conditions."""

    name: Literal["filter"] = "filter"
    field: str
    """`id`, `prompt`, `answer`, `response`, `rejected`, `taskset`, or a column of the task's metadata."""
    at_least: float | None = None
    """Minimum number."""
    at_most: float | None = None
    """Maximum number."""
    min_length: int | None = Field(None, ge=0)
    """Minimum length of a text in characters, or of a list in entries."""
    max_length: int | None = Field(None, ge=0)
    """Maximum length."""
    values: list[str | int | float | bool] | None = None
    """Allowed values."""
    matches: str | None = None
    """Regular expression that must match somewhere in the text."""
    present: bool | None = None
    """true: the field must not be empty. false: it must be empty."""
    exclude: bool = False
    """Drop the tasks that meet the conditions and keep all others."""

    @model_validator(mode="after")
    def _some_condition(self) -> Self:
        keys = [key for key in type(self).model_fields if key not in ("name", "field", "exclude")]
        if all(getattr(self, key) is None for key in keys):
            raise ValueError(f"give a condition: one of {', '.join(keys)}")
        if self.matches is not None:
            try:
                regex.compile(self.matches)
            except (regex.error, RecursionError) as error:
                raise ValueError(f"matches: not a regular expression: {error}; correct it") from error
        return self


class DeduplicateTasks(TaskOperatorSection):
    """Keeps the first of several tasks with the same or nearly the same prompt."""

    name: Literal["deduplicate"] = "deduplicate"
    by: Literal["exact", "near"] = "exact"
    """`exact`: equal except for case, spaces and Unicode form. `near`: equal except for some words (extra `dedup`)."""
    threshold: float = Field(0.9, gt=0, le=1)
    """Minimum Jaccard similarity of the word n-grams of duplicates. Only with `near`."""
    ngram: int = Field(3, ge=1)
    """Words per n-gram. Only with `near`."""
    permutations: int = Field(128, ge=16)
    """Length of the MinHash signatures; longer ones miss fewer duplicates. Only with `near`."""
    conflicting: Literal["first", "drop"] = "first"
    """Same prompt with different answers: keep the `first`, or `drop` all, because the right answer is unknown."""

    @model_validator(mode="after")
    def _near_only(self) -> Self:
        fields = type(self).model_fields
        for key in ("threshold", "ngram", "permutations"):
            if self.by == "exact" and getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is honoured with by: near; set it or remove {key}")
        return self


class DecontaminateTasks(TaskOperatorSection):
    """Drops tasks whose prompt overlaps with held-out ones."""

    name: Literal["decontaminate"] = "decontaminate"
    against: list[RowsSection] = []
    """Held-out tasks: sections with the keys of a taskset's rows. Default: the stage's `evaluation.taskset`."""
    ngram: int = Field(13, ge=2)
    """Drop a task if its prompt shares an n-gram of this many words with a held-out prompt. Shorter prompts are
    compared as a whole."""
    common: float = Field(0.1, gt=0, le=1)
    """N-grams in more than this fraction of the held-out prompts (and in more than 2) are part of a template and are
    ignored."""


class RateTaskDifficulty(TaskOperatorSection):
    """Writes each task's difficulty to the column `difficulty`, for orders, filters and `sort`."""

    name: Literal["difficulty"] = "difficulty"
    column: str = "difficulty"
    """Column to read: numbers, or words mapped by `values`."""
    scores: Path | None = None
    """File of `rollmill tasks score` to read `difficulty` from, by task id, instead of a column of the taskset."""
    values: dict[str, float] = {}
    """Difficulty of each word of the column, such as {easy: 0, medium: 0.5, hard: 1}."""
    range: tuple[float, float] | None = None
    """Numbers that are mapped to 0 and 1. The first may be the larger one: [1, 0] turns a success rate into a
    difficulty."""
    missing: float | None = None
    """Difficulty of tasks that have none. Default: an error that names them."""

    @model_validator(mode="after")
    def _range_has_ends(self) -> Self:
        if self.range is not None and self.range[0] == self.range[1]:
            raise ValueError(f"range: both ends are {self.range[0]:g}; give two numbers, such as [1, 5]")
        if self.scores is not None and (self.column != "difficulty" or self.values):
            raise ValueError("column and values are not honoured with scores; remove them")
        return self


class SortTasks(TaskOperatorSection):
    """Sorts tasks, easy to hard; for `order: sequential` and for `limit` of an evaluation."""

    name: Literal["sort"] = "sort"
    column: str = "difficulty"
    """Column with the numbers to sort by."""
    descending: bool = False
    """Sort from largest to smallest."""


class SampleTasks(TaskOperatorSection):
    """Keeps a random subset of the tasks, in their original order."""

    name: Literal["sample"] = "sample"
    n: int = Field(ge=1)
    """Number of tasks to keep; all, if there are fewer."""
    seed: int = 0
    """Seed of the random choice."""


TaskOperatorUnion = (
    CleanTasks | FilterTasks | DeduplicateTasks | DecontaminateTasks | RateTaskDifficulty | SortTasks | SampleTasks
)

TaskOperatorConfig = Annotated[
    SerializeAsAny[Annotated[TaskOperatorUnion, Field(discriminator="name")]],
    WrapValidator(RegisteredUnion("task_operator")),
]


__all__ = ["FieldsConfig", "GeneratorConfig", "MixEntry", "Preset", "RowsSection", "TasksetConfig", "TasksetSection"]

_OF_THE_WHOLE = {"pipeline", "on_bad_row", "mix"}
"""Keys of a taskset with `mix` itself; all others belong in its entries."""


class TasksetSection(RowsSection):
    """Tasks of one data source, prepared and ordered."""

    pipeline: list[TaskOperatorConfig] = []
    """Operators that clean, drop, rate or sort the tasks when they are loaded, in order."""
    order: OrderConfig = ShuffledOrder()
    """Order in which tasks are rolled out: a name, or a section with `name` and options."""

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
    """One taskset of a mix: all keys of a taskset but `mix`, and these."""

    name: PlainName
    """Name of the taskset: prefix of its task ids, and part of metric names."""
    weight: float = Field(1.0, gt=0)
    """Relative sampling weight of the taskset."""


class TasksetConfig(TasksetSection):
    """A taskset."""

    mix: list[MixEntry] = []
    """Tasksets to sample from in proportion to their weights, each in its own order, instead of one source."""

    def parts(self) -> list[TasksetSection]:
        """Returns the entries of a mix, or the taskset itself."""
        return [*self.mix] or [self]

    def sources(self) -> list[str]:
        """See RowsSection.sources."""
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


TasksetT = TypeVar("TasksetT", bound=TasksetSection)


def fill_decontamination_sets(taskset: TasksetConfig, evaluation: Sequence[TasksetConfig]) -> TasksetConfig:
    """Returns the training taskset with `against` of every `decontaminate` operator filled in from the stage's held-out
    tasks, unless the run file sets it; the same object if none lacks it."""
    if not any(_lacking(part) for part in [taskset, *taskset.mix]):
        return taskset
    keys = set(RowsSection.model_fields)
    rows = [RowsSection.model_validate(part.model_dump(include=keys)) for held in evaluation for part in held.parts()]
    return _filled(taskset, rows).model_copy(update={"mix": [_filled(entry, rows) for entry in taskset.mix]})


def _lacking(section: TasksetSection) -> bool:
    return any(isinstance(each, DecontaminateTasks) and not each.against for each in section.pipeline)


def _filled(section: TasksetT, rows: list[RowsSection]) -> TasksetT:
    pipeline = [
        each.model_copy(update={"against": rows}) if isinstance(each, DecontaminateTasks) and not each.against else each
        for each in section.pipeline
    ]
    return section.model_copy(update={"pipeline": pipeline})
