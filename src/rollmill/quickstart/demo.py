"""The quickstart: a run with an explanation of each step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

from rollmill.errors import ConfigError
from rollmill.launch import run
from rollmill.orchestrator.orchestrator import EVALUATIONS
from rollmill.trackers.metrics_log import Metrics
from rollmill.trackers.rollout_log import decode_experience
from rollmill.trackers.run_views import PlainView, RunView, make_view
from rollmill.types import Experience

RUN_FILE = "addition.yaml"
SHOWN = 3


class SparseView(PlainView):
    """Plain view that prints only every 60th step of long stages."""

    def step(self, metrics: Metrics, experiences: Sequence[Experience]) -> None:
        """Prints the step if its stage is short, if it was evaluated, or if it is a 60th."""
        self._progress.update(metrics)
        step = metrics["step"]
        assert isinstance(step, int)
        if self._progress.stage_total <= 60 or "eval/greedy" in metrics or step % 60 == 0:
            super().step(metrics, experiences)


def run_quickstart(out: Path, seed: int, stream: TextIO) -> dict[str, Any]:
    """Runs the quickstart in `out`, explains it on `stream`, and returns the summary of the run.

    Raises:
        ConfigError: `out` already holds a run.
    """
    if (out / "config.yaml").exists():
        raise ConfigError(f"{out} already holds a run; choose another --out, or look at it with `rollmill show {out}`")
    out.mkdir(parents=True, exist_ok=True)
    with resources.as_file(resources.files("rollmill.quickstart") / RUN_FILE) as file:
        shutil.copy(file, out / RUN_FILE)
    _say(stream, _OPENING.format(file=out / RUN_FILE))
    summary = run(out / RUN_FILE, [f"seed={seed}"], out, _view(stream))
    _say(stream, _AFTER.format(before=summary["accuracy_before"], after=summary["accuracy_after"]))
    _show_completions(out, summary, stream)
    _say(stream, _CLOSING.format(out=out, seconds=summary["seconds"]))
    return summary


def _view(stream: TextIO) -> RunView:
    return make_view(1, stream) if stream.isatty() else SparseView(stream)


def _show_completions(out: Path, summary: dict[str, Any], stream: TextIO) -> None:
    """Prints tasks that were wrong before the last stage, with both answers."""
    steps = [record["step"] for record in summary["evaluations"] if record["stage"] == summary["stages"][-1]]
    before, after = (_evaluation(out, step) for step in (steps[0], steps[-1]))
    wrong = [task for task, experience in before.items() if experience.reward != 1.0] or list(before)
    for task in wrong[:SHOWN]:
        _say(stream, f"  {before[task].prompt.strip()}")
        for name, experience in (("before", before[task]), ("after", after[task])):
            mark = "right" if experience.reward == 1.0 else "wrong"
            _say(stream, f"    {name:6}  {experience.response}   {mark}")


def _evaluation(out: Path, step: int) -> dict[str, Experience]:
    path = out / EVALUATIONS / f"step-{step:06d}.jsonl"
    with path.open() as lines:
        experiences = [decode_experience(json.loads(line)) for line in lines]
    return {experience.task_id: experience for experience in experiences}


def _say(stream: TextIO, text: str) -> None:
    print(text, file=stream, flush=True)


_OPENING = """\
A language model of 0.4M parameters learns to add three-digit numbers, on this CPU.
1. warm-start: it imitates a teacher that writes each column down but forgets 7 of 10 carries (supervised
   fine-tuning). The model learns the way of working, and the forgetting with it.
2. repair: it solves sums itself, 8 tries each; tries that end in the true sum are made more likely, the others
   less (GRPO). Nobody shows it a carry: the reward only looks at the final answer.
The run file is {file}; every key in it is yours to change."""

_AFTER = """
Held-out sums solved (greedy): {before:.1%} before the repair, {after:.1%} after it. For example:"""

_CLOSING = """
The run took {seconds:.0f} s. What to look at next:
  {out}/report.html     curves, phases, best and worst completions (open it in a browser)
  {out}/summary.json    the numbers
  rollmill show {out}   steps, rollouts and single completions with their tokens
  rollmill init         writes a first run file of your own"""
