"""Numbers that rewards log beside their value: from a run file to its metrics and its rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rollmill.cli import main
from rollmill.orchestrator.metrics import batch_metrics, domain_metrics, role_metrics
from rollmill.trackers import read_metrics
from rollmill.types import Experience

ROWS = [
    {"prompt": f"Q{n}", "answer": "12"[n % 2], "k12": {"type": "single", "options": ["x", "y"], "grade": 7 + n % 2}}
    for n in range(1, 7)
]
RUN = """\
model: {new: {hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, context: 48, tokenizer: {kind: char}}}
taskset: {path: tasks.jsonl}
rewards: [{name: k12}]
algorithm: {name: grpo}
rollout: {batch: 6, group_size: 2, max_new_tokens: 4}
stages: [{name: only, steps: 1}]
"""


def experience(details: dict[str, float] | None) -> Experience:
    ids, numbers = np.zeros(2, np.int32), np.zeros(2, np.float32)
    found = Experience("e", "t", "g", ids, np.ones(2, bool), numbers, ids, reward=1.0)
    if details is not None:
        found.info["details"] = details
    return found


def test_means_are_over_the_completions_that_have_a_detail() -> None:
    batch = [experience(None), experience({"k12/physics": 1.0}), experience({"k12/physics": 0.0, "k12/grade-8": 0.5})]
    metrics = batch_metrics(batch, version=0)
    assert (metrics["reward/k12/physics"], metrics["reward/k12/grade-8"]) == (0.5, 0.5)
    assert not any(name.startswith("reward/k12/") for name in batch_metrics([experience(None)], version=0))


def test_completions_of_later_versions_are_not_stale() -> None:
    """Another run's versions may be any; two of three here are the run's own."""
    batch = [experience(None) for _ in range(3)]
    for each, version in zip(batch, (3, 4, 90), strict=True):
        each.versions = np.full(2, version, np.int32)
    metrics = batch_metrics(batch, version=5)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)


def test_what_came_late_is_a_time_out_too() -> None:
    batch = [experience(None) for _ in range(3)]
    for each, outcome in zip(batch, ("timeout", "late", "ok"), strict=True):
        each.info["outcomes"] = {"math": outcome}
    assert batch_metrics(batch, version=0)["reward/timeouts"] == 2.0


def test_a_group_is_informative_by_the_rewards_of_one_role() -> None:
    batch = [experience(None) for _ in range(8)]
    for index, (one, reward) in enumerate(zip(batch, (1, 0, 1, 0, 1, 0, 0, 0), strict=True)):
        one.task_id, one.group, one.reward = "chess/1", f"g{index // 4}", float(reward)
        one.role = ("white", "black")[index % 2]
    assert domain_metrics(batch[:4], version=0)["domain/chess/informative"] == 0  # white always wins
    assert domain_metrics(batch, version=0)["domain/chess/informative"] == 0.5
    assert domain_metrics(batch, version=0)["domain/chess/reward"] == 0.375
    assert role_metrics(batch)["role/white/reward"] == 0.75


def test_a_run_logs_every_grade(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row | {"answer": "A"}) + "\n" for row in ROWS))
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(["run", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")]) == 0
    last = read_metrics(tmp_path / "out")[-1]
    rollouts = [json.loads(line) for line in (tmp_path / "out/rollouts/step-000001.jsonl").read_text().splitlines()]
    kept = [row["info"]["details"] for row in rollouts]
    for grade in ("7", "8"):
        values = [details[f"k12/grade-{grade}"] for details in kept if f"k12/grade-{grade}" in details]
        assert len(values) == 6
        assert last[f"reward/k12/grade-{grade}"] == np.mean(values)
