"""Prints docs/guide/run-file.md, made from the configuration models. A test compares the two."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.environments.base import EnvironmentSection
from rollmill.config.orders.base import OrderSection, SuccessRateOrder
from rollmill.config.resolve import RUN_KEYS
from rollmill.config.rewards.base import RewardSection
from rollmill.config.rewards.judges import JudgeSection
from rollmill.config.rewards.text import TextReward
from rollmill.config.run import RunConfig
from rollmill.config.section import Section
from rollmill.config.taskset import RowsSection, TasksetSection
from rollmill.config.tools.base import ToolSection
from rollmill.config.validation_errors import (
    SectionLocation,
    join_quoted,
    section_classes,
    section_locations,
    unwrap_annotation,
)
from rollmill.config.workflows.agents import ToolWorkflowSection

HEAD = """\
# The run file: every section and key

This page is generated from the models in `src/rollmill/config` by `docs/run_file_reference.py`; a test compares the
two, so it is never out of date.

Rules that hold everywhere:

- A run file is YAML. An unknown key is an error; the message names file, line and key and suggests the nearest key.
- A key that nothing in the run honours is an error, too. Example: `max_staleness` when the algorithm is `sft`.
- `include: FILE` (or a list) puts this file over others. Mappings merge, everything else replaces. An `algorithm`, a
  `generator` or a `taskset` that names another component replaces the old section as a whole.
- A part that is chosen by `name` may be the name alone: `loss: gspo` is `loss: {name: gspo}`. A part of an algorithm
  whose name is left out, or the same, keeps the algorithm's own values of the keys that are not given.
- `${env:NAME}` or `${env:NAME:default}` in any text is replaced by an environment variable.
- `--set section.key=value` on the command line changes one value and comes last; `--set rewards.0.weight=2` reaches
  into a list.
- Relative paths are looked up in the current folder, then in the folder of the file that names them.
- Numbers are those of YAML 1.2, so `1e-4` is a number. Whole numbers have 64 bits; there is no NaN and no infinity.
- A file has at most 1 MiB, 50 levels and 30,000 values, with what its anchors repeat; a run has at most 50 files. Only
  regular files in UTF-8 are read.
- Names of runs and stages are names of folders: in any script, with spaces, without `/` and `\\`, at most 100 bytes.

`rollmill check FILE` prints the resolved run. `rollmill check FILE --yaml` prints it as a run file with every default.
"""
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Family:
    """Sections with keys in common, which stand in a table of their own before the first of them."""

    base: type[Section]
    prefix: str
    title: str
    note: str

    def common(self) -> list[tuple[str, FieldInfo]]:
        """The common keys, without those of a wider family."""
        wider = [other.base for other in FAMILIES if issubclass(self.base, other.base) and other is not self]
        known = {key for base in wider for key in base.model_fields}
        return [(key, field) for key, field in _fields(self.base).items() if key != "name" and key not in known]


FAMILIES = (
    Family(RowsSection, "taskset", "keys of all sources of rows", "Where rows come from and how they become tasks."),
    Family(TasksetSection, "taskset", "keys of tasksets and entries of a mix", "How tasks are prepared and ordered."),
    Family(OrderSection, "taskset.order", "keys of all orders", "The tables of the orders list their own keys."),
    Family(SuccessRateOrder, "taskset.order", "keys of {members}", "What these orders keep of each task."),
    Family(EnvironmentSection, "environment", "keys of all environments", "The tables below list their own keys."),
    Family(ToolWorkflowSection, "workflow", "keys of {members}", "How the policy calls tools."),
    Family(ToolSection, "tools", "keys of all tools", "The tables below list their own keys."),
    Family(
        PolicyGradientOptions,
        "algorithm",
        "keys of all algorithms that roll out",
        "The tables of the algorithms list differences only; `rollmill algorithms NAME` prints one in full.",
    ),
    Family(RewardSection, "rewards", "keys of all rewards", "The tables of the rewards list their own keys."),
    Family(TextReward, "rewards", "keys of {members}", "Where in the completion these rewards look."),
    Family(JudgeSection, "rewards", "keys of {members}", "Which model judges, and how it is asked."),
)


def reference() -> str:
    """The page."""
    return (
        "\n".join(
            [HEAD, *_top_level(), *(line for home in section_locations()[1:] for line in _section(home))]
        ).rstrip()
        + "\n"
    )


def _top_level() -> Iterator[str]:
    yield "## Top level"
    yield ""
    yield "Keys of the whole run:"
    yield from _table({key: field for key, field in _fields(RunConfig).items() if key in RUN_KEYS})
    yield "Keys that every entry of `stages` may set for itself (each entry also needs a `name` of its own):"
    yield from _table({key: field for key, field in _fields(RunConfig).items() if key not in RUN_KEYS})


def _section(home: SectionLocation) -> Iterator[str]:
    for family in FAMILIES:
        if home.section is next(each.section for each in section_locations() if issubclass(each.section, family.base)):
            yield from _family(family)
    selector = f" (`name: {home.tag}`)" if home.tag else ""
    yield f"## `{home.prefix}`{selector}"
    yield ""
    yield _words(home.section.__doc__)
    shared = {
        key: field for family in FAMILIES if issubclass(home.section, family.base) for key, field in family.common()
    }
    fields = _fields(home.section)
    own = {key: field for key, field in fields.items() if key not in shared or _differs(field, shared[key])}
    yield from _table({key: field for key, field in own.items() if not (home.tag and key == "name")})


def _family(family: Family) -> Iterator[str]:
    tags = [str(home.tag) for home in section_locations() if issubclass(home.section, family.base) and home.tag]
    yield f"## `{family.prefix}`: {family.title.format(members=join_quoted(tags) if tags else '')}"
    yield ""
    yield family.note
    yield from _table(dict(family.common()))


def _table(fields: dict[str, FieldInfo]) -> Iterator[str]:
    if not fields:
        yield ""
        yield "No keys of its own."
        yield ""
        return
    yield ""
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in fields.items():
        cells = (f"`{key}`", _kind(field), _default(field), _meaning(key, field))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    return dict(section.model_fields)


def _differs(field: FieldInfo, other: FieldInfo) -> bool:
    return (field.default, field.annotation) != (other.default, other.annotation)


def _kind(field: FieldInfo) -> str:
    annotation, optional = unwrap_annotation(field.annotation), type(None) in get_args(field.annotation)
    bounds = [
        f"{word} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, word in _BOUNDS.items()
        if hasattr(rule, name)
    ]
    return ", ".join([_type(annotation), *bounds]) + (" or null" if optional else "")


def _type(annotation: Any) -> str:
    annotation = unwrap_annotation(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return "list of sections" if section_classes(arguments[0]) else f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_type(argument) for argument in arguments)}]"
    if origin is dict:
        return "mapping"
    if section_classes(annotation):
        return "section"
    if arguments:
        return " or ".join(_type(argument) for argument in arguments)
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`", Path: "path"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _written(field.default)


def _written(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(each, Section) for each in value):
        return f"`[{', '.join(_written(each).strip('`') for each in value)}]`"
    if isinstance(value, Section):
        plain = type(value).model_validate({"name": value.name} if hasattr(value, "name") else {})
        own = "".join(
            f", {key}: {json.dumps(each)}"
            for key, each in value.model_dump(mode="json").items()
            if key != "name" and each != plain.model_dump(mode="json")[key]
        )
        if hasattr(value, "name"):
            return f"`{{name: {value.name}{own}}}`"
        return f"`{{{own[2:]}}}`" if own else "its defaults"
    if isinstance(value, Enum | Path):
        value = str(value)
    return _code(
        value if isinstance(value, str) and not _needs_quotes(value) else json.dumps(value, ensure_ascii=False)
    )


def _needs_quotes(text: str) -> bool:
    """Whether a text is shown as YAML would hold it in quotes: empty, with space around it, or of several lines."""
    return text != text.strip() or not text.isprintable() or not text


def _code(text: str) -> str:
    """Text as code in one line of Markdown, whatever backticks it holds."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " * (text[:1] == "`" or text[-1:] == "`")
    return f"{fence}{space}{text}{space}{fence}"


def _meaning(key: str, field: FieldInfo) -> str:
    inner = unwrap_annotation(field.annotation)
    sections = section_classes(get_args(inner)[0] if get_origin(inner) is list else inner)
    if field.description:
        return _words(field.description)
    if len(sections) == 1:
        return _words(sections[0].__doc__)
    if key in PolicyGradientOptions.model_fields and key != "name":  # a key that an algorithm gives another default
        return _words(PolicyGradientOptions.model_fields[key].description)
    if sections:
        return f"One section per `name`, see `{key}` below."
    return {"name": "Name of the run (of the stage, inside `stages`)."}[key]


def _words(text: str | None) -> str:
    assert text, "every section and key of the configuration has a docstring"
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(reference())
