"""Rows of a data source and their mapping to tasks, shared by all sections of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.hub import parse_reference, reference_of
from rollmill.config.section import Section

Preset = Literal["gsm8k", "humaneval", "cmath", "cn_middle_school", "gaokao_qa", "gaokao_cloze", "mmlu"]


class GeneratorConfig(Section):
    """A reasoning-gym generator (extra `reasoning`)."""

    needs_extra = ("reasoning", "reasoning_gym")

    name: str
    """Name of the reasoning-gym dataset, for example `chain_sum`."""
    size: int = Field(1000, ge=1)
    """Number of tasks to generate."""
    seed: int = 0
    """Seed of the generator."""
    options: dict[str, Any] = {}
    """Keyword arguments of the generator's configuration, for example {min_terms: 2, max_terms: 3}."""


class FieldsConfig(Section):
    """Mapping from columns to the fields of a task."""

    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer: str | None = None
    """Column with the reference answer for rewards. Default: `answer`, if it exists."""
    response: str | None = None
    """Column with a worked solution, which SFT and MIX imitate and DPO prefers. Default: `response` or `chosen`, if it
    exists."""
    rejected: str | None = None
    """Column with a worse solution, for preference pairs. Default: `rejected`, if it exists."""
    label: str | None = None
    """Column with the KTO label of the response: desirable (true) or undesirable (false). Default: `label`, if there is
    also a column `completion`, which then is the response."""
    id: str | None = None
    """Column with a unique id. Default: the row number."""
    rewards: str | None = None
    """Column with the names of the rewards that score the row: a name, or a list of them. Default: all rewards."""
    workflow: str | None = None
    """Column with the name of the workflow that rolls the row out: the stage's, with its options, or another one, with
    its defaults. A row without a name, and all rows by default, have the stage's workflow."""
    tools: str | None = None
    """Column with JSON schemas of tools, which the chat template shows in the prompt. Default: `tools`, if it holds
    such schemas; empty: none."""
    images: str | None = None
    """Column with an image or a list of images (extra `vision`): paths, relative to the taskset's file; bytes, as in
    Parquet; images of `datasets`; data URLs. Default: `images` or `image`, if it holds these; empty: none."""

    def extras(self) -> dict[str, tuple[str, str]]:
        return {"images": ("vision", "PIL")} if self.images else {}


class RowsSection(Section):
    """Rows of one data source, mapped to tasks."""

    path: Path | None = None
    """A .jsonl, .json, .parquet or .csv file, a folder written by `datasets.save_to_disk`, or a data set of the Hugging
    Face hub (`hf://ORG/NAME[@REVISION]`)."""
    split: str | None = None
    """Split of a `datasets` folder, or of a data set of the hub, that holds several. Only with a folder or an id."""
    subset: str | None = None
    """Subset (configuration) of a data set of the hub that has several. Only with an id."""
    generator: GeneratorConfig | None = None
    function: str | None = None
    """`FILE.py:NAME` (or `package.module:NAME`) of a Python function that returns or yields rows (mappings)."""
    harbor: Path | None = None
    """A task folder of Harbor, or a folder of them, for `environment: container` and the reward `container`."""
    options: dict[str, Any] = {}
    """Keyword arguments for `function`. Only with `function`."""
    preset: Preset | None = None
    """A known layout. `gsm8k`: question/answer rows as published, gold answer after `####`, calculator marks removed.
    `humaneval`: functions to complete, for the `code` reward, with the canonical solution as response. The others are
    school questions for the reward `k12`."""
    fields: FieldsConfig = FieldsConfig()
    template: str | None = None
    """Prompt template with `{column}` placeholders, like "Question: {question}\\nAnswer:". Default: the prompt
    column."""
    response_template: str | None = None
    """Template of the worked solution."""
    system: str | None = None
    """System message. Only with `chat: true`."""
    chat: bool = False
    """Wrap the prompt as a user message and apply the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Values for the chat template, the same for all tasks, for example {enable_thinking: false}. Those of a row's
    column `chat_template_kwargs` win. Only with prompts that are chats."""
    images: Literal["see", "text"] = "see"
    """Pictures of the rows: `see`: the policy sees them, so it must be a vision-language model. `text`: only rewards
    do; a text model is trained on the text of the prompts."""
    min_pixels: int | None = Field(None, ge=1)
    """Scale pictures with fewer pixels up to this many, keeping their proportions, before the policy sees them."""
    max_pixels: int | None = Field(None, ge=1)
    """Scale pictures with more pixels down to this many, keeping their proportions, before the policy sees them."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Handling of rows that cannot become tasks. Skipped rows are counted and named in the log."""
    limit: int | None = Field(None, ge=1)
    """Use only the first N tasks, before the pipeline."""

    def extras(self) -> dict[str, tuple[str, str]]:
        if self.path is None:
            return {}
        remote = parse_reference(str(self.path)) is not None or reference_of(self.path) is not None
        needed = self.path.suffix.lower() == ".parquet" or self.path.is_dir() or remote
        return {"path": ("data", "pyarrow")} if needed else {}  # `datasets` reads folders, and brings pyarrow

    def sources(self) -> list[str]:
        """Returns the keys that give a data source; there should be exactly one."""
        return [key for key in ("path", "generator", "function", "harbor") if getattr(self, key) is not None]

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = self.sources()
        if len(given) != 1:
            found = "none of them" if not given else " and ".join(given)
            raise ValueError(f"give exactly one of {self._choices()} (found {found})")
        for key in ("split", "subset"):
            if getattr(self, key) is not None and self.path is None:
                raise ValueError(f"{key} is honoured only with path")
        if self.options and self.function is None:
            raise ValueError("options are honoured only with function (generator has options of its own)")
        if self.system is not None and not self.chat:
            raise ValueError("system is honoured only with chat: true")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels is {self.min_pixels}, more than max_pixels ({self.max_pixels})")
        return self

    def _choices(self) -> str:
        return "path, generator, function and harbor"
