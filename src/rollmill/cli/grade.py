"""`rollmill grade`: run a reward, or all rewards of a run file, over a JSONL file of responses."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args

import typer
from pydantic import TypeAdapter, ValidationError

from rollmill.cli.grade_summary import print_summary_tables, summarize_judgements
from rollmill.config.loader import load_run
from rollmill.config.rewards import RewardConfig
from rollmill.config.run import StageConfig
from rollmill.config.section import Section, section_tag
from rollmill.config.tree import ConfigProblem, raise_problems, to_plain_data
from rollmill.config.validation_errors import (
    explain_unknown_key,
    join_quoted,
    section_classes,
    suggest_match,
)
from rollmill.config.yaml_file import parse_override_value
from rollmill.errors import ConfigError
from rollmill.files import describe_json_error, parse_strict_json, read_text

if TYPE_CHECKING:
    from rollmill.rewards import RewardManager, RewardResult
    from rollmill.types import Completion, Task

_CONCURRENT_ROWS = 256


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
    workers: Annotated[int | None, typer.Option(min=1, help="Grader processes. Default: judging.workers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Score every line of a file, and write the lines with `reward`, `parts` and `outcomes`.

    If a reward fails, the lines scored so far are written before the command ends with exit code 1.

    Lines with the same `group` are one group for rewards that compare completions. The summary goes to standard error,
    or to standard output with --json and --output.
    """
    from rollmill.files import explain_write_errors
    from rollmill.rewards import build_reward_manager
    from rollmill.rewards.domains import build_domain_rewards

    stage = _chosen(reward, run, option or [])
    rows = read_response_rows(input)
    tasks = [_task(number, row, input, stage) for number, row in enumerate(rows, 1)]

    def build(view: StageConfig) -> RewardManager:
        judging = view.judging if workers is None else view.judging.model_copy(update={"workers": workers})
        return build_reward_manager(view.rewards, judging)

    with build_domain_rewards(stage, build) as manager, _opened(output) as file:
        judged, failure = asyncio.run(_judge_all(manager, rows, tasks))
        counted = manager.counters()
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


def parse_reward_config(name: str, options: list[str]) -> RewardConfig:
    """Build the configuration of the reward `name` from `key=value` options (values are YAML, or plain text).

    Raises ConfigError for an unknown reward or key, and for a wrong value.
    """
    sections = {section_tag(section): section for section in section_classes(get_args(RewardConfig)[0])}
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
        config: RewardConfig = TypeAdapter(RewardConfig).validate_python(values)
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
    try:
        row = parse_strict_json(line, unique_keys=True)
    except ValueError as error:
        raise ConfigError(f"{where}: {describe_json_error(error)}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {type(row).__name__}")
    if not isinstance(row.get("response"), str):
        what = "has no `response`" if "response" not in row else f"`response` is {type(row['response']).__name__}"
        raise ConfigError(f"{where}: {what}; every line needs the text to score as a string")
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


async def _judge_all(
    manager: RewardManager, rows: list[dict[str, Any]], tasks: list[Task]
) -> tuple[dict[int, RewardResult], Exception | None]:
    """Return the results by the position of their row, in order, and the first failure.

    Rows after a failure are cancelled, rows before it are completed.
    """
    gate = asyncio.Semaphore(_CONCURRENT_ROWS)
    groups = _groups(rows, tasks) if manager.groupwise else {number: [number] for number in range(len(rows))}

    async def one(group: str | int, members: list[int]) -> list[RewardResult]:
        async with gate:
            completions = [_completion(index, rows[number]["response"]) for index, number in enumerate(members)]
            if isinstance(group, str):
                return await manager.score_group(tasks[members[0]], completions)
            return [await manager.score(tasks[members[0]], completions[0])]

    judging = [asyncio.create_task(one(group, members)) for group, members in groups.items()]
    failure: Exception | None = None
    found: dict[int, RewardResult] = {}
    try:
        for members, work in zip(groups.values(), judging, strict=True):
            if failure is not None:
                work.cancel()
            try:
                found |= zip(members, await work, strict=True)
            except asyncio.CancelledError:
                if failure is None:
                    raise
            except Exception as error:
                failure = failure or error
    finally:
        for work in judging:
            work.cancel()
        await asyncio.gather(*judging, return_exceptions=True)
    return {number: found[number] for number in sorted(found)}, failure


def _groups(rows: list[dict[str, Any]], tasks: list[Task]) -> dict[str | int, list[int]]:
    """Return the positions of the rows by their `group`; a row without one is its own group, by its position.

    Raises ConfigError if a group has several questions or answers.
    """
    groups: dict[str | int, list[int]] = {}
    for number, row in enumerate(rows):
        label = row.get("group")
        groups.setdefault(number if label is None else str(label), []).append(number)
    for group, members in groups.items():
        first = tasks[members[0]]
        for other in [tasks[number] for number in members]:
            if (other.prompt, other.answer) != (first.prompt, first.answer):
                which = join_quoted([first.id, other.id])
                raise ConfigError(
                    f"group `{group}`: {which} differ in `prompt` or `answer`; give every task a group of its own"
                )
    return groups


def _task(number: int, row: dict[str, Any], file: Path, stage: StageConfig) -> Task:
    """Return the task of a row. Missing images keep their names: rewards that need them report the error.

    Raises ConfigError if the stage has domains and the row names none of them.
    """
    from rollmill.data.images import metadata_with_images
    from rollmill.types import Task

    domain = row.get("domain")
    if stage.domains and domain not in stage.domains:
        found = "names no domain" if domain is None else f"names the domain {domain!r:.60}"
        names = join_quoted(list(stage.domains))
        raise ConfigError(f'{file}:{number}: the row {found}; the run has {names}: give it as "domain"')
    own = row.get("metadata")
    metadata = own if isinstance(own, dict) else row
    try:
        metadata = metadata_with_images(metadata, None, file.parent)
    except ValueError:
        metadata = {"images": metadata.get("image"), **metadata}
    return Task(
        id=str(row.get("id", number)),
        prompt=row.get("prompt", ""),
        answer=row.get("answer"),
        metadata=metadata,
        taskset=str(domain) if stage.domains else "",
    )


def _completion(number: int, text: str) -> Completion:
    """Build a completion that has only text: nothing was generated, so there are no tokens."""
    import numpy as np

    from rollmill.types import Completion, StopReason

    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=number)
