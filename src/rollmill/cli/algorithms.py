"""`rollmill algorithms`: print the table of algorithms, or one in full."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmill.config.algorithms import known_algorithms
from rollmill.config.algorithms.base import AlgorithmOptions, PolicyGradientOptions
from rollmill.config.describe import format_algorithm_parts
from rollmill.config.validation_errors import suggest_match
from rollmill.config.yaml_file import write_yaml
from rollmill.errors import ConfigError
from rollmill.registry import import_file

WIDTH = 120


def command(
    name: Annotated[str | None, typer.Argument(help="Algorithm to print. Default: the table of all.")] = None,
    plugins: Annotated[
        list[Path] | None, typer.Option("--plugin", metavar="FILE.py", help="Python file to import first (repeatable).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the table of algorithms, or one algorithm with its formula and resolved parts."""
    for plugin in plugins or []:
        import_file(plugin)
    known = known_algorithms()
    if name is not None and name not in known:
        raise ConfigError(f"no algorithm `{name}`{suggest_match(name, list(known)) or ';'} known: {', '.join(known)}")
    chosen = known if name is None else {name: known[name]}
    if as_json:
        print(json.dumps([_entry(key, section) for key, section in chosen.items()], indent=2, ensure_ascii=False))
    elif name is None:
        print("\n".join(_table(known)))
    else:
        print(_page(name, known[name]))


def _entry(name: str, section: type[AlgorithmOptions]) -> dict[str, Any]:
    options = section.model_validate({"name": name})
    return {
        "name": name,
        "summary": " ".join((inspect.getdoc(section) or "").split()),
        "source": section.source,
        "learns_from": _learns_from(section),
        "definition": _definition(section),
        "options": options.model_dump(mode="json"),
    }


def _table(known: dict[str, type[AlgorithmOptions]]) -> list[str]:
    rows = [("name", "advantage", "loss", "aggregation", "source")]
    for name, section in known.items():
        options = section.model_validate({"name": name})
        cells: tuple[str, str, str] = ("", _learns_from(section), str(getattr(options, "aggregation", "")))
        if isinstance(options, PolicyGradientOptions):
            loss = " x ".join([options.loss.name, *(mask.name for mask in options.masks)])
            cells = (options.advantage.name, loss, options.aggregation)
        rows.append((name, *cells, section.source if len(section.source) < 20 else Path(section.source).name))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _page(name: str, section: type[AlgorithmOptions]) -> str:
    options = section.model_validate({"name": name})
    lines = [*_definition(section).splitlines(), ""]
    lines += [f"source         {section.source}"] if section.source else []
    lines += [f"learns from    {_learns_from(section)}", ""]
    for part, words in format_algorithm_parts(options):
        start = f"{part:<14} "
        lines += textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=" " * 15, break_on_hyphens=False)
    lines += ["", "As a section of a run file, with every key that it honours:", ""]
    return "\n".join(lines) + "\n" + write_yaml({"algorithm": _honoured(options)}).rstrip()


def _honoured(options: AlgorithmOptions) -> dict[str, Any]:
    keys = options.model_dump(mode="json")
    for path, each in options.walk():
        inside: Any = keys
        for key in path:
            inside = inside.get(key, {}) if isinstance(key, str) else inside[key]
        for key in each.unused_keys():
            inside.pop(key, None)
    return keys


def _definition(section: type[AlgorithmOptions]) -> str:
    """Return the formula and remarks of a built-in algorithm, or the docstring of a user's function or class."""
    return inspect.cleandoc(vars(section).get("formula", "")) or inspect.getdoc(section) or section.__name__


def _learns_from(section: type[AlgorithmOptions]) -> str:
    sources = {
        "rollouts": section.uses_rollouts,
        "worked solutions": section.uses_demonstrations,
        "preference pairs": section.uses_pairs,
        "labelled completions": section.uses_labels,
    }
    return " and ".join(name for name, used in sources.items() if used)
