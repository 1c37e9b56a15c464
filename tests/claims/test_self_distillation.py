"""A policy that learns from itself: with the solution in its prompt it knows the answer, and comes to do without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks
from support.tiny import tiny_run

ADDITION = "rollmill.quickstart.addition:rows"
SHOWN = '''
from rollmill.quickstart.addition import rows


def shown(size, seed, share):
    """Sums, a share of them after their own solution."""
    for number, row in enumerate(rows(size, seed, digits=2)):
        if number % 10 < 10 * share:
            row["prompt"] = f"{row['response']} {row['prompt']}"
        yield row
'''
MODEL = {"hidden_size": 96, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 256, "context": 96}
HELD_OUT = {"function": ADDITION, "options": {"size": 200, "seed": 2, "digits": 2, "held_out": True}}
SELF: dict[str, Any] = {"name": "self_distill", "template": "{context} {prompt}"}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_policy_comes_to_do_without_what_its_teacher_sees(server: Forks, tmp_path: Path) -> None:
    """Imitation of sums, most of them after their solution, makes a policy that copies better than it adds."""
    (tmp_path / "shown.py").write_text(SHOWN)
    told = {"function": "shown.py:shown", "options": {"size": 3000, "seed": 1, "share": 0.7}}
    all_told = {"function": "shown.py:shown", "options": {"size": 100, "seed": 5, "share": 1.0}}
    imitate = {
        "name": "imitate",
        "steps": 300,
        "taskset": told,
        "algorithm": {"name": "sft", "batch": 32},
        "trainer": {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 20},
    }
    teach = {
        "name": "teach",
        "steps": 40,
        "taskset": {"function": ADDITION, "options": {"size": 3000, "seed": 1, "digits": 2}},
        "algorithm": SELF | {"weights": "initial"},
        "trainer": {"lr": 5e-4},
        "evaluation": {"every": 40},
    }
    tiny_run(
        tmp_path,
        model={"new": MODEL | {"initializer_range": 0.06}},
        taskset=None,
        rewards=[{"name": "exact", "after": "#"}],
        rollout={"batch": 32, "group_size": 2, "max_new_tokens": 28},
        evaluation={
            "taskset": HELD_OUT,
            "sets": {"told": {"taskset": all_told}},
            "every": 300,
            "at_start": False,
        },
        stages=[imitate, teach],
    )
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    before, after = (row for row in rows if "eval/sampled" in row)
    assert before["eval/told/sampled"] > 0.9
    assert before["eval/sampled"] < 0.6
    assert after["eval/sampled"] > before["eval/sampled"] + 0.1
