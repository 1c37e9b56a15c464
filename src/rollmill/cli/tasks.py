"""`rollmill tasks`: inspect a run's tasks, rate their difficulty, and generate answers with a teacher."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.data import Taskset
    from rollmill.rewards.builtin.judge import JudgeReward

HELP = "Inspect a run's tasks, rate their difficulty, and generate answers with a teacher."
_BARS, _WIDTH, _SAMPLES = 10, 40, 8

Config = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example model.path=DIR.")
]
Stage = Annotated[str | None, typer.Option(help="Stage whose tasks are used (default: the first that rolls out).")]


def score(
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="JSONL file of the rated tasks; rows in it are kept.")],
    by: Annotated[
        Literal["policy", "judge"], typer.Option(help="Success rate of the model, or a judge's estimate.")
    ] = "policy",
    samples: Annotated[int | None, typer.Option(min=1, help="Completions per task, by policy (default: 8).")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Endpoint of the judge (default: the run's own judge).")] = None,
    model: Annotated[str | None, typer.Option(help="The judge's name at the endpoint.")] = None,
    stage: Stage = None,
    overrides: Overrides = None,
) -> None:
    """Rate the difficulty of every task of a run, and write the tasks with `success_rate` and `difficulty` (0 to 1).

    By policy, the run's model answers each task with the run's sampling and rewards; difficulty is 1 - success rate. By
    judge, a language model estimates it from the prompt. If started again with the same file, it continues.
    """
    from rollmill.config.loader import load_run
    from rollmill.orchestrator.task_difficulty import find_stage, score_by_judge, score_by_policy

    if by == "policy" and (endpoint is not None or model is not None):
        raise ConfigError("--endpoint and --model are honoured only with --by judge; add it, or remove them")
    if by == "judge" and samples is not None:
        raise ConfigError("--samples is honoured only with --by policy; remove it (a judge has the key `votes`)")
    judge = _judge(endpoint, model)
    loaded = load_run(config, overrides or [])
    chosen = find_stage(loaded, stage)

    def progress(rated: int, tasks: int) -> None:
        print(f"{rated} of {tasks} tasks rated", file=sys.stderr)

    if by == "policy":
        found = score_by_policy(loaded, chosen, out, samples or _SAMPLES, progress)
    else:
        found = score_by_judge(chosen, judge, out, progress)
    print(f"{out}: {found.rated} of {found.tasks} tasks rated")
    if found.without:
        names = ", ".join(found.without[:5]) + (" ..." if len(found.without) > 5 else "")
        advice = "run the command again to rate them, or see why no reward applies"
        print(f"no verdict for {len(found.without)} tasks ({names}); {advice}")


def answer(
    config: Config,
    by: Annotated[Path, typer.Option("--by", help="File (.yaml) with the endpoint of the model that answers.")],
    out: Annotated[Path, typer.Option("--out", help="JSONL file of the answered tasks; rows in it are kept.")],
    samples: Annotated[int, typer.Option(min=1, help="Answers per task.")] = 4,
    stage: Stage = None,
    overrides: Overrides = None,
) -> None:
    """Let a served model answer every task of a run, and write the tasks with its best right answer as `response`.

    The run's rewards decide which answers are right. Stages that imitate can use the file as a taskset. If started
    again with the same file, it continues.
    """
    from rollmill.config.loader import load_run
    from rollmill.orchestrator.generate_demonstrations import generate_demonstrations as answered
    from rollmill.orchestrator.task_difficulty import find_stage

    loaded = load_run(config, overrides or [])

    def progress(done: int, tasks: int) -> None:
        print(f"{done} of {tasks} tasks answered", file=sys.stderr)

    found, solved = answered(loaded, find_stage(loaded, stage), by, out, samples, progress)
    print(f"{out}: {found.rated} of {found.tasks} tasks answered, {solved} of them right")
    if found.without:
        names = ", ".join(found.without[:5]) + (" ..." if len(found.without) > 5 else "")
        print(f"no answer to {len(found.without)} tasks ({names}); run the command again to ask for them")


def show(
    config: Config,
    stage: Stage = None,
    column: Annotated[str, typer.Option(help="Column of the histogram.")] = "difficulty",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    overrides: Overrides = None,
) -> None:
    """Load a run's tasks and print the effect of the pipeline, the sets of a mix, and a histogram of difficulty."""
    from rollmill.config.describe import TaskCount
    from rollmill.config.loader import load_run
    from rollmill.data import load_taskset
    from rollmill.orchestrator.task_difficulty import find_stage

    chosen = find_stage(load_run(config, overrides or []), stage)
    taskset = load_taskset(chosen.required_taskset)
    shown = _shown(taskset, column)
    if as_json:
        print(json.dumps({"stage": chosen.name, **shown}, ensure_ascii=False))
        return
    count = TaskCount(len(taskset.tasks), taskset.left_out())
    print(f"stage {chosen.name}: {count.tasks} tasks of {taskset.name}, {count.describe_left_out()}")
    for report in taskset.reports:
        print(f"  {report}")
    for name, count in shown["sets"].items():
        print(f"  {name}: {count} tasks")
    _print_histogram(shown)


def _judge(endpoint: str | None, model: str | None) -> JudgeReward | None:
    from rollmill.rewards.builtin.judge import JudgeReward

    if endpoint is None and model is None:
        return None
    try:
        return JudgeReward(name="judge", endpoint=endpoint, model=model)
    except ValidationError as error:
        raise ConfigError(f"--endpoint and --model: {error.errors()[0]['ctx']['error']}") from error


def _shown(taskset: Taskset, column: str) -> dict[str, Any]:
    from rollmill.data.readers import to_finite_number

    numbers = [to_finite_number(task.metadata.get(column)) for task in taskset.tasks]
    known = [number for number in numbers if number is not None]
    sets = {each.name: sum(task.taskset == each.name for task in taskset.tasks) for each in taskset.mixed}
    reports = [
        {
            "taskset": report.taskset,
            "operator": report.operator,
            "seen": report.seen,
            "kept": report.kept,
            "changed": dict(report.changes),
            "dropped": dict(Counter(report.dropped.values())),
        }
        for report in taskset.reports
    ]
    whole = {"tasks": len(taskset.tasks), "rejected": len(taskset.rejected), "sets": sets, "pipeline": reports}
    return whole | {"column": column, "without": len(numbers) - len(known), "histogram": _histogram(known)}


def _histogram(numbers: list[float]) -> list[tuple[float, float, int]]:
    """Return bars of equal width: from, up to, tasks. They span 0 to 1 if all numbers do, else the extremes."""
    if not numbers:
        return []
    low, high = min(numbers), max(numbers)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    if low == high:
        return [(low, high, len(numbers))]
    counts = [0] * _BARS
    for number in numbers:
        counts[min(int((number - low) / (high - low) * _BARS), _BARS - 1)] += 1
    width = (high - low) / _BARS
    return [(low + bar * width, low + (bar + 1) * width, count) for bar, count in enumerate(counts)]


def _print_histogram(shown: dict[str, Any]) -> None:
    bars = shown["histogram"]
    if not bars:
        print(f"no task has a number in the column {shown['column']}")
        return
    rest = f"; {shown['without']} tasks have none" if shown["without"] else ""
    print(f"{shown['column']}{rest}")
    most = max(count for *_, count in bars)
    for low, high, count in bars:
        line = "#" * (-(-count * _WIDTH // most))
        print(f"  {low:6.3g} to {high:6.3g}  {count:7}  {line}".rstrip())


COMMANDS = {"score": score, "answer": answer, "show": show}
