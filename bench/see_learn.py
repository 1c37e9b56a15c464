"""Held-out accuracy of examples/see.yaml before GRPO and after it, by kind of question, and without the pictures.

Per seed, a new model is written and the file runs as with `rollmill run`: stage 1 imitates answers of which half are
wrong, stage 2 is GRPO. Accuracies are those of the run's own evaluations, sampled and greedy.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.harness import ROOT, BenchError, import_path, note
from bench.report import Case, finish

RUN_FILE = ROOT / "examples" / "see.yaml"
RESULT = "see_learn"
BLANK = "blank"
LEAST = 0.005  #: one of 200 questions: there is no ratio to none
SETS = ("count", "locate", "add", BLANK)


def learn(seeds: Sequence[int], runs: Path, settings: Sequence[str], only_json: bool) -> None:
    """Run the example with each seed, unless it has run into `runs`, and write the result."""
    learned = [_run(seed, runs, settings) for seed in seeds]
    cases = [
        Case(
            name,
            "before GRPO",
            "share right, sampled",
            [one["after"][f"{name}/sampled"] for one in learned],
            [max(one["before"][f"{name}/sampled"], LEAST) for one in learned],
            higher_is_better=True,
            extra={
                f"{measure}_{when}": [one[when][f"{name}/{measure}"] for one in learned]
                for measure in ("sampled", "greedy")
                for when in ("before", "after")
            },
        )
        for name in SETS
    ]
    cases[0].extra["runs"] = [{key: one[key] for key in ("seed", "seconds", "cpu_s")} for one in learned]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    finish(RESULT, cases, headline=cases[:-1], versions=versions, only_json=only_json)


def markdown(record: dict[str, Any]) -> list[str]:
    """Rows of the documentation's table, from the result file: mean accuracies over the seeds."""
    labels = {
        "count": "count shapes",
        "locate": "locate a shape",
        "add": "add two digits",
        BLANK: "all, pictures blank",
    }

    def mean(values: list[float]) -> str:
        return f"{sum(values) / len(values):.2f}".removeprefix("0")

    return [
        f"| {labels[case['case']]} | "
        + " | ".join(
            f"{mean(case[f'{measure}_before'])} | {mean(case[f'{measure}_after'])}" for measure in ("sampled", "greedy")
        )
        + " |"
        for case in record["cases"]
    ]


def _run(seed: int, runs: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Accuracies before and after stage 2, with the seconds of the wall and of all processors, loading included."""
    folder, costs = runs / f"seed-{seed}", runs / f"seed-{seed}.json"
    if not costs.is_file():
        note(f"  running {RUN_FILE.name} with seed {seed}; see {folder}")
        model = runs / f"model-{seed}"
        changes = [part for each in [*settings, f"seed={seed}", f"model.path={model}"] for part in ("--set", each)]
        before, began = _cpu_seconds(), time.perf_counter()
        _call(str(RUN_FILE.with_suffix(".py")), "--out", str(model), "--seed", str(seed))
        _call("-m", "rollmill", "run", str(RUN_FILE), "--out", str(folder), *changes)
        spent = {"seconds": round(time.perf_counter() - began, 1), "cpu_s": round(_cpu_seconds() - before, 1)}
        costs.write_text(json.dumps(spent))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if f"eval/{BLANK}/sampled" in row]
    first = [row for row in evaluated if row["stage"] == "imitate"][-1]
    found = {
        when: {f"{name}/{measure}": row[f"eval/{name}/{measure}"] for name in SETS for measure in ("sampled", "greedy")}
        for when, row in (("before", first), ("after", evaluated[-1]))
    }
    return {"seed": seed, **found, **json.loads(costs.read_text())}


def _call(*arguments: str) -> None:
    """Run Python in the root of the repository. Raises BenchError if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BenchError(f"{' '.join(arguments[:4])} failed:\n{done.stderr[-2000:]}")


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
