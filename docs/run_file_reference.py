"""Prints docs/guide/run-file.md, made from the configuration models. A test compares the two."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.environments import EnvironmentSection
from rollmill.config.key_docs import describe_default, describe_meaning, describe_value, join_lines
from rollmill.config.orders import OrderSection, SuccessRateOrder
from rollmill.config.resolve import RUN_KEYS
from rollmill.config.rewards.base import RewardSection
from rollmill.config.rewards.judges import JudgeSection
from rollmill.config.rewards.text import TextReward
from rollmill.config.run import RunConfig
from rollmill.config.section import Section
from rollmill.config.taskset import RowsSection, TasksetSection
from rollmill.config.tools import ToolSection
from rollmill.config.validation_errors import (
    SectionLocation,
    join_quoted,
    section_locations,
)
from rollmill.config.workflows import ToolWorkflowSection

HEAD = """\
# The run file: every section and key

This page is generated from the models in `src/rollmill/config` by `docs/run_file_reference.py`; a test compares the
two, so it is never out of date.

Rules that hold everywhere:

- A run file is YAML. An unknown key is an error; the message names file, line and key and suggests the nearest key.
- A key that nothing in the run uses is an error, too. Example: `max_staleness` when the algorithm is `sft`.
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
`rollmill explain trainer.lr` prints one key of this page, `rollmill explain lr` all keys of that name, and
`rollmill explain gspo` a component with its keys.
"""


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
    Family(RowsSection, "taskset", "keys of all sources of rows", "The source of rows, and their conversion to tasks."),
    Family(TasksetSection, "taskset", "keys of tasksets and entries of a mix", "Preparation and order of the tasks."),
    Family(OrderSection, "taskset.order", "keys of all orders", "The tables of the orders list their own keys."),
    Family(SuccessRateOrder, "taskset.order", "keys of {members}", "Success rates that these orders track."),
    Family(EnvironmentSection, "environment", "keys of all environments", "The tables below list their own keys."),
    Family(ToolWorkflowSection, "workflow", "keys of {members}", "The form of tool calls."),
    Family(ToolSection, "tools", "keys of all tools", "The tables below list their own keys."),
    Family(
        PolicyGradientOptions,
        "algorithm",
        "keys of all algorithms that roll out",
        "The tables of the algorithms list differences only; `rollmill algorithms NAME` prints one in full.",
    ),
    Family(RewardSection, "rewards", "keys of all rewards", "The tables of the rewards list their own keys."),
    Family(TextReward, "rewards", "keys of {members}", "The part of the completion that these rewards read."),
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
    yield join_lines(home.section.__doc__)
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
        cells = (f"`{key}`", describe_value(field), describe_default(field), describe_meaning(key, field))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    return dict(section.model_fields)


def _differs(field: FieldInfo, other: FieldInfo) -> bool:
    return (field.default, field.annotation) != (other.default, other.annotation)


if __name__ == "__main__":
    sys.stdout.write(reference())
