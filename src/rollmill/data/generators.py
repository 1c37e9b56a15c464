"""Generated rows: reasoning-gym generators and users' Python functions."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from rollmill.config.rows import GeneratorConfig
from rollmill.data.readers import SourceRow, SourceRows, make_record
from rollmill.errors import TasksetError
from rollmill.registry import import_object


def generate_rows(config: GeneratorConfig) -> SourceRows:
    """Entries of a reasoning-gym generator, with the columns prompt (the question), question, answer and metadata.

    The task's metadata keeps the generator and the entry: `reasoning_gym` = {name, options}, `entry` as generated.

    Raises:
        TasksetError: the generator does not exist, rejects the options, or fails.
    """
    dataset = _create(config)
    made_by = {"name": config.name, "options": config.options}
    for number in range(config.size):
        where = f"{config.name}: row {number}"
        try:
            entry = dataset[number]
        except Exception as error:  # the generators' own errors, of any kind
            raise TasksetError(f"taskset.generator: {where} cannot be generated: {_short(error)}") from error
        metadata = {"reasoning_gym": made_by, "entry": entry}
        yield SourceRow(where, {"prompt": entry["question"], **entry}, metadata=metadata)


def _create(config: GeneratorConfig) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise TasksetError("taskset.generator needs reasoning-gym: pip install 'rollmill[reasoning]'") from error
    if config.name not in DATASETS:
        near = get_close_matches(config.name, list(DATASETS), n=1)
        advice = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(DATASETS))}"
        raise TasksetError(f"taskset.generator.name: reasoning-gym has no {config.name}{advice}")
    twice = sorted({"size", "seed"} & config.options.keys())
    if twice:
        raise TasksetError(
            f"taskset.generator.options: {', '.join(twice)} is a key of taskset.generator; write it there"
        )
    try:
        return reasoning_gym.create_dataset(config.name, size=config.size, seed=config.seed, **config.options)
    except Exception as error:  # assertions, type errors and value errors of the generator's configuration
        raise TasksetError(f"taskset.generator.options: {config.name} refuses them: {_short(error)}") from error


def call_row_function(spec: str, options: dict[str, Any]) -> SourceRows:
    """Rows that a user's function returns or yields.

    Raises:
        ConfigError: the function does not exist.
        TasksetError: it raised, or did not return rows.
    """
    function = import_object(spec)
    if not callable(function):
        raise TasksetError(f"taskset.function: {spec} is a {type(function).__name__}, not a function")
    try:
        rows = function(**options)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise TasksetError(f"taskset.function: {spec} raised {_short(error)}{_place(error)}") from error
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise TasksetError(
            f"taskset.function: {spec} returned a {type(rows).__name__}; return or yield rows (mappings)"
        )
    return _rows(spec, rows)


def _rows(spec: str, rows: Iterable[Any]) -> SourceRows:
    number = 0
    try:
        for row in rows:
            yield make_record(f"{spec}: row {number}", row)
            number += 1
    except (Exception, SystemExit) as error:
        raise TasksetError(f"taskset.function: {spec} raised {_short(error)} at row {number}{_place(error)}") from error


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}:{frame.lineno})"
