"""`taskset.pipeline`: operators on tasks when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import regex
from pydantic import Field, model_validator

from rollmill.config.rows import RowsSection
from rollmill.config.section import NamedSection, module_sections, section_union

TextField = Literal["prompt", "answer", "response", "rejected"]


class TaskOperatorSection(NamedSection):
    """An operator chosen by name; its other keys are its options."""


class CleanTasks(TaskOperatorSection):
    """Normalises texts. Drops tasks whose prompt is empty afterwards."""

    implementation = "rollmill.data.operators.clean:clean"
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

    implementation = "rollmill.data.operators.filters:filter_tasks"
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

    implementation = "rollmill.data.operators.deduplication:deduplicate"
    name: Literal["deduplicate"] = "deduplicate"
    by: Literal["exact", "near"] = "exact"
    """`exact`: equal except for case, spaces and Unicode form. `near`: equal except for some words (extra `dedup`)."""
    threshold: float = Field(0.9, gt=0, le=1)
    """Minimum Jaccard similarity of the word n-grams of duplicates. Only with `near`."""
    ngram: int = Field(3, ge=1)
    """Words per n-gram. Only with `near`."""
    permutations: int = Field(128, ge=16)
    """Length of the MinHash signatures; longer ones miss fewer duplicates. Only with `near`."""
    pictures: Literal["exact", "alike"] = "exact"
    """Pictures of duplicates: `exact`: the same files. `alike`: they look the same, scaled or compressed in another way
    (perceptual hash)."""
    picture_distance: int = Field(4, ge=0, le=32)
    """Bits, of 64, in which the hashes of pictures may differ. Only with `pictures: alike`."""
    conflicting: Literal["first", "drop"] = "first"
    """Same prompt with different answers: keep the `first`, or `drop` all, because the right answer is unknown."""

    def extras(self) -> dict[str, tuple[str, str]]:
        return {"by": ("dedup", "datasketch")} if self.by == "near" else {}

    @model_validator(mode="after")
    def _near_only(self) -> Self:
        fields = type(self).model_fields
        for key in ("threshold", "ngram", "permutations"):
            if self.by == "exact" and getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is honoured with by: near; set it or remove {key}")
        if self.pictures == "exact" and self.picture_distance != fields["picture_distance"].default:
            raise ValueError("picture_distance is honoured with pictures: alike; set it or remove picture_distance")
        return self


class DecontaminateTasks(TaskOperatorSection):
    """Drops tasks whose prompt overlaps with held-out ones."""

    implementation = "rollmill.data.operators.deduplication:decontaminate_by_sections"
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

    implementation = "rollmill.data.operators.difficulty:difficulty"
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

    implementation = "rollmill.data.operators.filters:sort"
    name: Literal["sort"] = "sort"
    column: str = "difficulty"
    """Column with the numbers to sort by."""
    descending: bool = False
    """Sort from largest to smallest."""


class SampleTasks(TaskOperatorSection):
    """Keeps a random subset of the tasks, in their original order."""

    implementation = "rollmill.data.operators.filters:sample"
    name: Literal["sample"] = "sample"
    n: int = Field(ge=1)
    """Number of tasks to keep; all, if there are fewer."""
    seed: int = 0
    """Seed of the random choice."""


if TYPE_CHECKING:
    TaskOperatorConfig = TaskOperatorSection
else:
    TaskOperatorConfig = section_union(module_sections(__name__, TaskOperatorSection), kind="task_operator")
