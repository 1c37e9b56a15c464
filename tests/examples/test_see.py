"""The example with a policy that sees: it learns from pictures, and without them it falls to chance."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from forks import Forks

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["stages.0.steps=2", "stages.0.trainer.warmup_steps=1", "stages.0.evaluation.every=2", "stages.1.steps=2"]
SHORT += ["evaluation.every=2", "evaluation.sets.shapes.limit=8", "evaluation.sets.blank.limit=8"]
SHORT += ["stages.0.taskset.options.size=64", "stages.1.taskset.options.size=64", "rollout.batch=8"]


def run_example(server: Forks, folder: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Write the checkpoint, run the file and return its metrics."""
    module = importlib.util.spec_from_file_location("see", ROOT / "examples/see.py")
    assert module is not None
    assert module.loader is not None
    see = importlib.util.module_from_spec(module)
    module.loader.exec_module(see)
    see.write_checkpoint(folder / "models/see")
    words = [word for each in settings for word in ("--set", each)]
    ended = server.run("run", str(ROOT / "examples/see.yaml"), "--out", "out", *words, folder=folder)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_example_runs_and_its_report_shows_the_pictures(server: Forks, tmp_path: Path) -> None:
    rows = run_example(server, tmp_path, SHORT)
    gaps = [row["logprob_gap/max"] for row in rows if "logprob_gap/max" in row]
    assert gaps
    assert max(gaps) < 1e-4
    assert {"eval/shapes/greedy", "eval/blank/greedy"} <= rows[-1].keys()
    assert '<image href="data:image/png;base64,' in (tmp_path / "out/report.html").read_text()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shapes_are_counted_and_located_by_looking(server: Forks, tmp_path: Path) -> None:
    rows = run_example(server, tmp_path, [])
    evaluated = [row for row in rows if "eval/shapes/greedy" in row]
    assert evaluated[-1]["eval/shapes/greedy"] > 0.35
    assert evaluated[-1]["eval/shapes/greedy"] > evaluated[-1]["eval/blank/greedy"] + 0.2
    for row in evaluated:  # one in four numbers, one in sixteen places
        assert row["eval/blank/greedy"] < 0.3
