"""Worker: the prediction of `rollmill plan` for a run file, or the measurements of its run, stage by stage."""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.worker import Channel, versions


def predicted(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Predict by stage: seconds per step, tokens per second and memory peaks in GB."""
    from rollmill.apps.plan.planning.planner import plan_run

    found = {}
    for plan in plan_run(Path(args.config), overrides(args)):
        memory = {f"memory/{phase}": memory.total / 1e9 for phase, memory in plan.memory.items()}
        step = plan.prediction
        seconds = {f"seconds/{phase}": each for phase, each in step.seconds.items()}
        found[plan.stage.name] = seconds | memory | {"tokens_per_second": step.tokens_per_second}
    return found


def measured(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the same in a run: medians over the second half of its steps, after compilation, and highest peaks."""
    from rollmill.launch import run
    from rollmill.trackers import read_metrics
    from rollmill.trackers.run_views import PlainView

    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
        run(args.config, overrides(args), out=Path(folder) / "run", view=PlainView(io.StringIO()))
        rows = read_metrics(Path(folder) / "run")
    found = {}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage]
        own = own[len(own) // 2 :]
        timed = [key for key in own[-1] if key.startswith("seconds/") and key not in OUTSIDE]
        values = {key: statistics.median(row.get(key, 0.0) for row in own) for key in (*timed, "tokens_per_second")}
        peaks = [key for key in own[-1] if key.startswith("memory/")]
        found[stage] = values | {key: max(row[key] for row in own) for key in peaks}
    return found


OUTSIDE = ("seconds/eval", "seconds/checkpoint")


def overrides(args: argparse.Namespace) -> list[str]:
    """Overrides of the run file: no checkpoint during the run, no report."""
    return ["checkpoint.every=100000", "monitor.report=false", *args.set]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("predicted", "measured"), required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    if args.processor_time:
        vars(time)["perf_counter"] = time.process_time  # before rollmill is imported
    channel = Channel()
    channel.say(versions=versions("torch", "transformers"))
    work: Any = predicted if args.kind == "predicted" else measured
    for _ in channel.commands():
        channel.say(stages=work(args))


if __name__ == "__main__":
    main()
