"""`rollmill grade`: run one reward over a JSONL file of responses."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args

import typer
import yaml
from pydantic import TypeAdapter, ValidationError

from rollmill.config.base import Section
from rollmill.config.hints import did_you_mean, quoted, sections_of, tag_of, unknown_key
from rollmill.config.rewards import RewardConfig
from rollmill.core.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.core.types import Completion, Task
    from rollmill.rewards import Judge, Judgement

_AT_ONCE = 256


def command(
    reward: Annotated[str, typer.Option("--reward", help="A built-in reward, or FILE.py:NAME of a Python function.")],
    input: Annotated[Path, typer.Option("--input", help='JSONL file: {"response": ..., "answer": ..., ...} a line.')],
    output: Annotated[Path | None, typer.Option("--output", help="Where to write. Default: standard output.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="A key of the reward (repeatable).")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Grader processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Judge every line of a file: the same lines come out with `reward`, `parts` and `outcomes`.

    The summary goes to standard error, or to standard output with --json and --output.
    """
    from rollmill.config.judging import JudgingConfig
    from rollmill.rewards import build_judge

    config = reward_config(reward, option or [])
    rows = read_rows(input)
    with build_judge([config], JudgingConfig(workers=workers)) as judge, _opened(output) as file:
        judgements = asyncio.run(_judge_all(judge, rows))
        for row, judgement in zip(rows, judgements, strict=True):
            row |= {"reward": judgement.reward, "parts": judgement.parts, "outcomes": judgement.outcomes}
            if judgement.details:
                row["details"] = judgement.details
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    summary = summarise(reward, judgements)
    if as_json:
        print(json.dumps(summary), file=sys.stdout if output else sys.stderr)
    else:
        _print_table(summary)


def reward_config(name: str, options: list[str]) -> RewardConfig:
    """The configuration of the reward `name` with `key=value` options (values are YAML, or plain text).

    Raises ConfigError for an unknown reward or key, and for a wrong value.
    """
    sections = {tag_of(section): section for section in sections_of(get_args(RewardConfig)[0])}
    values: dict[str, Any] = {"name": name}
    if ":" in name:
        values = {"name": "python", "function": name}
    elif name not in sections:
        near = did_you_mean(name, list(sections))
        raise ConfigError(f"--reward: no reward `{name}`{near}; there are {quoted(list(sections))}, and FILE.py:NAME")
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text}: expected key=value")
        if key not in sections[values["name"]].model_fields:
            raise ConfigError(f"--option {text}: {unknown_key(key, sections[values['name']])}")
        try:
            values[key] = value if _is_text(sections[values["name"]], key) else yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {text}: the value is not YAML: {error}") from error
    try:
        config: RewardConfig = TypeAdapter(RewardConfig).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        raise ConfigError(f"reward `{name}`: {place}: {first['msg']}; give it as --option {place}=VALUE") from error
    return config


def _is_text(section: type[Section], key: str) -> bool:
    """Whether a key takes text, which is not read as YAML: `after=####` would be a comment."""
    return section.model_fields[key].annotation in (str, str | None, Path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, blank lines left out. Raises ConfigError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    lines = text.split("\n")
    rows = [_row(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: no lines to grade")
    return rows


def _row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {type(row).__name__}")
    if not isinstance(row.get("response"), str):
        what = "has no `response`" if "response" not in row else f"`response` is {type(row['response']).__name__}"
        raise ConfigError(f"{where}: {what}; every line needs the text to judge as a string")
    return row


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    with file:
        yield file


async def _judge_all(judge: Judge, rows: list[dict[str, Any]]) -> list[Judgement]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int, row: dict[str, Any]) -> Judgement:
        async with gate:
            return await judge.judge(_task(number, row), _completion(number, row["response"]))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, row)) for number, row in enumerate(rows, 1)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 (it has a cause of its own)
    return [task.result() for task in tasks]


def _task(number: int, row: dict[str, Any]) -> Task:
    from rollmill.core.types import Task

    metadata = row.get("metadata")
    return Task(
        id=str(row.get("id", number)),
        prompt=row.get("prompt", ""),
        answer=row.get("answer"),
        metadata=metadata if isinstance(metadata, dict) else row,
    )


def _completion(number: int, text: str) -> Completion:
    """A completion that has only text: nothing was generated, so there are no tokens."""
    import numpy as np

    from rollmill.core.types import Completion, StopReason

    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=number)


def summarise(name: str, judgements: list[Judgement]) -> dict[str, Any]:
    """Counts, the mean reward of what was judged, outcomes, and the median and 99th percentile of seconds."""
    rewards = [judgement.reward for judgement in judgements if judgement.reward is not None]
    seconds = sorted(judgement.seconds for judgement in judgements)
    return {
        "reward": name,
        "count": len(judgements),
        "judged": len(rewards),
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "outcomes": dict(Counter(outcome for each in judgements for outcome in each.outcomes.values())),
        "seconds_p50": seconds[len(seconds) // 2],
        "seconds_p99": seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)],
    }


def _print_table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("reward", summary["reward"])
    table.add_row("judged", f"{summary['judged']} of {summary['count']}")
    table.add_row("mean", "-" if summary["mean"] is None else f"{summary['mean']:.4f}")
    for outcome, count in summary["outcomes"].items():
        table.add_row(f"outcome {outcome}", str(count))
    table.add_row("seconds p50 / p99", f"{summary['seconds_p50']:.4f} / {summary['seconds_p99']:.4f}")
    Console(stderr=True).print(table)
