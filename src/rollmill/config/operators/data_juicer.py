"""`data_juicer`: operators of Data-Juicer on the text of completions."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import SuccessOperatorSection


class DataJuicerFilter(SuccessOperatorSection):
    """Runs operators of Data-Juicer (the package py-data-juicer) over the text of completions."""

    name: Literal["data_juicer"] = "data_juicer"
    process: list[dict[str, Any]] = Field(min_length=1)
    """Operators as in a Data-Juicer recipe: [{words_num_filter: {min_num: 10}}, ...]. Filters drop completions; those
    that need a whole data set are refused."""
    text: Literal["response", "prompt", "both"] = "response"
    """What the operators read."""
    mapped: Literal["refuse", "expert"] = "refuse"
    """What mappers, which change text, may do: nothing, or make expert experiences of the texts they changed, where
    the completion is a success (`part`, `threshold`). The completion itself keeps its tokens."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        for entry in self.process:
            if len(entry) != 1:
                raise ValueError("each entry of process is one operator, as in {words_num_filter: {min_num: 10}}")
        if self.mapped == "expert" and self.text != "response":
            raise ValueError("mapped: expert needs text: response, which is what changes")
        self.reject_unused_keys(("part", "threshold"), self.mapped == "expert", "with mapped: expert")
        return self
