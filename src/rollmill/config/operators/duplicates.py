"""Operators against completions that say the same."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import OperatorSection


class DuplicatesOperator(OperatorSection):
    """Drops completions whose text was there before, but for white space. The first one stays."""

    name: Literal["duplicates"] = "duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Where it was there before: in the group, in the run for the same task, or in the run for any task."""
    ignore_case: bool = False
    """Upper and lower case are the same."""
    memory: int = Field(10_000, ge=1)
    """How many texts are remembered; what was not seen for longest is forgotten. Not with `within: group`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self


class NearDuplicatesOperator(OperatorSection):
    """Drops completions whose n-grams are nearly those of an earlier one (MinHash and LSH, extra `dedup`)."""

    name: Literal["near_duplicates"] = "near_duplicates"
    within: Literal["group", "task", "run"] = "group"
    """Which earlier ones count: of the group, of the run for the same task, or of the run for any task."""
    threshold: float = Field(0.8, gt=0, le=1)
    """Jaccard similarity of the n-grams, as estimated, from which a completion is dropped."""
    unit: Literal["words", "characters"] = "words"
    """What n-grams consist of. A character of Chinese, Japanese or Thai is a word, and so is a punctuation mark."""
    ngram: int = Field(3, ge=1)
    """Units of an n-gram; 3 words or 5 characters are usual."""
    permutations: int = Field(128, ge=16)
    """Hash functions: the estimate is off by about 1 / sqrt of this."""
    memory: int = Field(2_000, ge=1)
    """How many completions are remembered, the newest. Not with `within: group`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.within != "group", "with within: task and within: run")
        return self
