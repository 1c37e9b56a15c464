"""The examples of reward models: one learns to tell right sums from wrong ones, the other learns sums from it."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path

import pytest

from rollmill.launch import run
from rollmill.trackers.metrics_log import read_metrics
from rollmill.trackers.run_views import PlainView

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_learns_from_the_reward_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    for name in ("reward_model", "reward_model_use"):
        assert run(Path(f"examples/{name}.yaml"), ["trainer.precision=fp32"], view=PlainView(io.StringIO()))["status"]
    ranked = [row["pairs/accuracy"] for row in read_metrics(Path("runs/reward-model"))]
    assert ranked[0] == 0.5
    assert sum(ranked[-20:]) / 20 > 0.97
    rows = [row for row in read_metrics(Path("runs/reward-model-use")) if row["stage"] == "learn"]
    assert all(math.isfinite(row["reward/model"]) and row["judged"] == 256 for row in rows)
    before, after = (sum(row["reward/exact"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert before < 0.7
    assert after > 0.85
    assert rows[-1]["reward/model"] > rows[0]["reward/model"] + 2
