"""`rollmill grade`: run a reward, or all rewards of a run file, over a JSONL file of responses."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from pydantic import TypeAdapter, ValidationError

from rollmill.cli.grade_summary import print_summary_tables, summarize_judgements
from rollmill.config.loader import load_run
from rollmill.config.rewards import Reward, RewardConfig, built_in_rewards
from rollmill.config.run import StageConfig
from rollmill.config.section import Section, section_tag
from rollmill.config.tree import ConfigProblem, raise_problems, to_plain_data
from rollmill.config.validation_errors import (
    explain_unknown_key,
    join_quoted,
    suggest_match,
)
from rollmill.config.yaml_file import parse_override_value
from rollmill.errors import ConfigError
from rollmill.files import describe_json_error, parse_strict_json, read_text

if TYPE_CHECKING:
    from rollmill.rewards import RewardResult


def command(
    input: Annotated[
        Path, typer.Option("--input", help='JSONL file with {"response": ..., "answer": ..., ...} per line.')
    ],
    reward: Annotated[
        str | None, typer.Option("--reward", help="A built-in reward, or FILE.py:NAME of a Python function.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run file: use the rewards of its last stage, as the run would.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Output file. Default: standard output.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="A key of the reward (repeatable).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Grader processes. Default: reward_settings.workers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Score every line of a file, and write the lines with `reward`, `parts` and `outcomes`.

    If a reward fails, the lines scored so far are written before the command ends with exit code 1.

    Lines with the same `group` are one group for rewards that compare completions. The summary goes to standard error,
    or to standard output with --json and --output.
    """
    from rollmill.files import explain_write_errors
    from rollmill.rewards.grading import build_graders, judge_rows, row_task

    stage = _chosen(reward, run, option or [])
    rows = read_response_rows(input)
    places = enumerate(rows, 1)
    tasks = [row_task(number, row, f"{input}:{number}", input.parent, stage) for number, row in places]
    with closing(build_graders(stage, workers)) as scorers, _opened(output) as file:
        judged, failure = asyncio.run(judge_rows(scorers, rows, tasks))
        counted = scorers.counters()
        is_input = output is not None and output.samefile(input)
        if not (failure and is_input):  # keep lines of the input that were not scored
            if output is not None and output.is_file() and judged:
                file.truncate(0)  # keep the old content until there is something to write
            with explain_write_errors(output or Path("standard output")):
                file.writelines(_line(rows[number], result) for number, result in judged.items())
                file.flush()
        if failure is not None:
            done = "scored, and none written over the input" if is_input else "scored and written"
            print(f"{len(judged)} of {len(rows)} lines were {done}", file=sys.stderr)
            raise failure
    summary = summarize_judgements(reward or str(run), list(judged.values())) | (
        {"counters": counted} if counted else {}
    )
    if as_json:
        print(json.dumps(summary), file=sys.stdout if output else sys.stderr)
    else:
        print_summary_tables(summary)


def _chosen(reward: str | None, run: Path | None, options: list[str]) -> StageConfig:
    """Return a stage with the rewards."""
    if (reward is None) == (run is None):
        raise ConfigError("give --reward NAME or --run FILE.yaml, one of them")
    if reward is not None:
        return StageConfig(rewards=[parse_reward_config(reward, options)])
    assert run is not None
    if options:
        raise ConfigError("--option goes with --reward; a run file's rewards are changed in the file")
    stage = load_run(run, []).stages[-1]
    if not any(view.rewards for view in stage.by_domain().values()):
        raise ConfigError(f"{run}: its last stage, {stage.name}, has no rewards")
    return stage


def parse_reward_config(name: str, options: list[str]) -> Reward:
    """Build the configuration of the reward `name` from `key=value` options (values are YAML, or plain text).

    Raises ConfigError for an unknown reward or key, and for a wrong value.
    """
    sections = {section_tag(section): section for section in built_in_rewards()}
    values: dict[str, Any] = {"name": name}
    if ":" in name:
        values = {"name": "python", "function": name}
    elif name not in sections:
        near = suggest_match(name, list(sections))
        raise ConfigError(
            f"--reward: no reward `{name}`{near}; there are {join_quoted(list(sections))}, and FILE.py:NAME"
        )
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text}: expected key=value")
        if key not in sections[values["name"]].model_fields:
            raise ConfigError(f"--option {text}: {explain_unknown_key(key, sections[values['name']])}")
        values[key] = value if _is_text(sections[values["name"]], key) else _value(f"--option {text}", key, value)
    try:
        config: Reward = TypeAdapter(RewardConfig).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        if not place:  # a rule of several keys
            raise ConfigError(
                f"reward `{name}`: {first['ctx']['error']}; keys are given as --option KEY=VALUE"
            ) from error
        raise ConfigError(f"reward `{name}`: {place}: {first['msg']}; give it as --option {place}=VALUE") from error
    return config


def _value(option: str, key: str, text: str) -> Any:
    """Parse the value of an option, like that of `--set`."""
    problems: list[ConfigProblem] = []
    found = to_plain_data(parse_override_value(text, option, Path(), (key,), problems))
    raise_problems(problems)
    return found


def _is_text(section: type[Section], key: str) -> bool:
    """Return whether a key takes text, which is not parsed as YAML: `after=####` would be a comment."""
    return section.model_fields[key].annotation in (str, str | None, Path)


def read_response_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file, without blank lines. Raises ConfigError naming file and line."""
    lines = read_text(path).split("\n")
    rows = [_row(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: no lines to grade")
    return rows


def _row(where: str, line: str) -> dict[str, Any]:
    from rollmill.rewards.grading import require_response

    try:
        row = parse_strict_json(line, unique_keys=True)
    except ValueError as error:
        raise ConfigError(f"{where}: {describe_json_error(error)}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {type(row).__name__}")
    require_response(where, row)
    return row


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # already flushed
            file.close()


def _line(row: dict[str, Any], result: RewardResult) -> str:
    """Format a line of output as readable text; lone surrogates, which UTF-8 cannot hold, are escaped."""
    row = row | {"reward": result.reward, "parts": result.parts, "outcomes": result.outcomes}
    if result.details:
        row["details"] = result.details
    text = json.dumps(row, ensure_ascii=False)
    return re.sub(r"[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text) + "\n"
