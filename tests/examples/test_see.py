"""The example with a vision-language policy: it learns from pictures, and without them it falls to chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks

from rollmill.user_code import import_object

ROOT = Path(__file__).resolve().parents[2]
SETS = ("count", "locate", "add", "blank")
SHORT = [
    # sums alone are learned within seconds; there are no mistakes to unlearn
    "stages.0.taskset.options={size: 4000, seed: 1, kinds: [add], mistakes: 0}",
    "stages.0.steps=120",
    "stages.0.evaluation.every=120",
    "stages.1.taskset.options={size: 64, kinds: [add]}",
    "stages.1.steps=2",
    "evaluation.every=2",
    "rollout.batch=8",
    *(f"evaluation.sets.{name}.limit={60 if name in ('add', 'blank') else 4}" for name in SETS),
    "evaluation.sets.blank.taskset.options.kinds=[add]",
]


def run_example(server: Forks, folder: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Write the checkpoint, run the file and return its metrics."""
    pytest.importorskip("sklearn")
    import_object(f"{ROOT / 'examples/see.py'}:write_checkpoint")(folder / "models/see")
    words = [word for each in settings for word in ("--set", each)]
    ended = server.run("run", str(ROOT / "examples/see.yaml"), "--out", "out", *words, folder=folder)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_few_steps_show_pictures_in_the_report(server: Forks, tmp_path: Path) -> None:
    few = ["stages.0.steps=2", "stages.0.trainer.warmup_steps=0", "stages.0.evaluation.every=2"]
    few += [f"evaluation.sets.{name}.limit=4" for name in SETS]
    rows = run_example(server, tmp_path, [*SHORT, *few])
    gaps = [row["logprob_gap/max"] for row in rows if "logprob_gap/max" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    assert '<image href="data:image/png;base64,' in (tmp_path / "out/report.html").read_text()


@pytest.mark.thorough
@pytest.mark.slow
def test_digits_are_added_by_looking(server: Forks, tmp_path: Path) -> None:
    rows = run_example(server, tmp_path, SHORT)
    assert rows[-1]["eval/add/greedy"] > 0.4
    assert rows[-1]["eval/blank/greedy"] < 0.25  # the best guess is right in a tenth of the questions


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_grpo_unlearns_mistakes_in_what_is_seen(server: Forks, tmp_path: Path) -> None:
    rows = run_example(server, tmp_path, [])
    before, *_, after = [row for row in rows if "eval/count/sampled" in row]
    for name in ("count", "locate", "add"):
        assert after[f"eval/{name}/sampled"] > before[f"eval/{name}/sampled"] + 0.05, name
    for row in (before, after):  # guesses are right in one of 4, 9 and 10 questions
        assert row["eval/blank/greedy"] < 0.25
