"""`rollmill explain`: what a key or a component of the run file means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated

import typer
from pydantic.fields import FieldInfo

from rollmill.config.key_docs import describe_default, describe_meaning, describe_value, join_lines
from rollmill.config.validation_errors import (
    COMMON_KEY_ALIASES,
    FORMER_NAMES,
    SectionLocation,
    section_locations,
    suggest_match,
)
from rollmill.errors import ConfigError

_WIDTH = 120


def command(
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY", help="A key (trainer.lr, lr), a section (rollout) or a name (gspo).")
    ],
) -> None:
    """Print the meaning, the values and the default of keys, and the keys of sections and components."""
    print("\n\n".join("\n".join(_explain(key)) for key in keys))


def _explain(query: str) -> Iterator[str]:
    """Raises ConfigError, with the nearest key, if nothing has this name."""
    homes = section_locations()
    words = {query, (COMMON_KEY_ALIASES | FORMER_NAMES).get(query, query)}  # as others, or earlier files, call it
    sections = [home for home in homes if words & _names(home)]
    words = {query} if sections else words
    keys = [(home, key) for home in homes for key in home.section.model_fields if words & _key_names(home, key)]
    whole = [(home, key) for home, key in keys if len(words) == 1 and _path(home, key) == query]
    # `rollout` is a key of a stage and a section: the section says more. `trainer.lr` is meant alone.
    if not sections and not keys:
        known = {name for home in homes for name in _names(home)}
        known |= {name for home in homes for key in home.section.model_fields for name in _key_names(home, key)}
        near = suggest_match(query, sorted(known - {""}))
        raise ConfigError(f"no key, section or component `{query}`{near or '; docs/run-file/README.md lists all'}")
    for number, home in enumerate(sections):
        yield from [""] * (number > 0)
        yield from _section(home)
    for number, (home, key) in enumerate([] if any(query in _names(home) for home in sections) else whole or keys):
        yield from [""] * (number > 0 or bool(sections))
        yield from _key(home, key, home.section.model_fields[key])


def _names(home: SectionLocation) -> set[str]:
    """Texts that mean a section: `rollout`; `rewards.code` or `code`."""
    return {f"{home.prefix}.{home.tag}", home.tag} if home.tag else {home.prefix}


def _path(home: SectionLocation, key: str) -> str:
    return f"{home.prefix}.{key}".lstrip(".")


def _key_names(home: SectionLocation, key: str) -> set[str]:
    """Texts that mean a key: `trainer.lr` or `lr`; of a component also `rewards.code.credit`, `code.credit`."""
    if home.tag and key == "name":
        return set()
    names = {key, _path(home, key)}
    return names | {f"{home.prefix}.{home.tag}.{key}", f"{home.tag}.{key}"} if home.tag else names


def _key(home: SectionLocation, key: str, field: FieldInfo) -> Iterator[str]:
    chosen = f" (name: {home.tag})" if home.tag else ""
    yield f"{_path(home, key)}{chosen}"
    yield f"  value    {_plain(describe_value(field))}"
    yield f"  default  {_plain(describe_default(field))}"
    yield from textwrap.wrap(describe_meaning(key, field), _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _section(home: SectionLocation) -> Iterator[str]:
    chosen = f" (name: {home.tag})" if home.tag else ""
    yield f"{home.prefix}{chosen}"
    text = join_lines(home.section.__doc__)
    yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    for key, field in home.section.model_fields.items():
        if not (home.tag and key == "name"):
            yield ""
            yield f"  {key}: {_plain(describe_value(field))}; default {_plain(describe_default(field))}"
            meaning = describe_meaning(key, field)
            yield from textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _plain(markdown: str) -> str:
    """Text without the marks of code."""
    return markdown.replace("`", "")
