"""The commands as functions: grade and resume, for runs and data that a script holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rollmill.api.foreground import run_in_foreground
from rollmill.api.inputs import INPUTS, RUN_FILE, RunInputs
from rollmill.api.training_run import TrainingRun
from rollmill.config.loader import load_evaluation_run
from rollmill.config.yaml_file import write_yaml
from rollmill.files import atomic_write

if TYPE_CHECKING:
    from rollmill.orchestrator.run_control import Callback
    from rollmill.rewards import RewardResult


def resume(run: str | Path | TrainingRun, callbacks: Sequence[Callback] = (), **settings: Any) -> TrainingRun:
    """Go on with an interrupted run from its newest checkpoint, and return it; see `TrainingRun.resume`.

    Args:
        callbacks: as at its start; default: those of the object, if it is one.
        settings: to change before: `steps=200` extends a finished run.
    """
    opened = run if isinstance(run, TrainingRun) else TrainingRun.open(run)
    opened.callbacks = callbacks or opened.callbacks
    return opened.resume(**settings)


def grade(rows: Sequence[Mapping[str, Any]], rewards: Any, *, workers: int | None = None) -> list[RewardResult]:
    """Score responses that are there already.

    Args:
        rows: each has `response`, and what its task has: `prompt`, `answer`, other columns; rows with the same `group`
            are compared with each other by rewards that do so.
        rewards: functions, names or sections, as for a run.
        workers: grader processes. Default: 1.

    Returns the results in the order of the rows: `reward`, `parts`, `outcomes`, `details`.

    Raises:
        ConfigError: a row has no response, or a reward's settings are wrong.
        RewardError: a reward failed; the message names the row.
    """
    with TemporaryDirectory(prefix="rollmill-grade-") as temporary:
        inputs = RunInputs(Path(temporary) / INPUTS)
        file = Path(temporary) / RUN_FILE
        atomic_write(file, write_yaml(inputs.section({"rewards": rewards})).encode())
        return run_in_foreground(lambda view, interrupts: _grade(rows, file, workers))


def _grade(rows: Sequence[Mapping[str, Any]], file: Path, workers: int | None) -> list[RewardResult]:
    from rollmill.rewards.grading import build_graders, judge_rows, require_response, row_task

    stage = load_evaluation_run(file).stages[-1]
    for number, row in enumerate(rows):
        require_response(f"row {number}", row)
    places = enumerate(rows, 1)
    tasks = [row_task(number, row, f"row {number - 1}", Path.cwd(), stage) for number, row in places]
    with closing(build_graders(stage, workers)) as rewards:
        found, failure = asyncio.run(judge_rows(rewards, rows, tasks))
    if failure is not None:
        raise failure
    return list(found.values())
