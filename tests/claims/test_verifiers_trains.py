"""An environment of the library verifiers trains as it is: its rollouts are recorded at the explorer's endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.tiny import NEW_MODEL

import rollmill

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv-verifiers/bin/python"
SUMS = str(ROOT / "tests/support/verifiers_sums.py")
HERE = {"taskset": SUMS, "python": str(OWN), "options": {"size": 9}}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OWN.is_file(), reason="needs .venv-verifiers/bin/python: make verifiers-setup")
def test_rollouts_of_verifiers_are_learned_from(tmp_path: Path) -> None:
    pytest.importorskip("rollmill.apps.serve.endpoint.policy_endpoint", reason="needs the explorer's endpoint")
    run = {
        "model": {"new": NEW_MODEL | {"context": 96}},
        "taskset": {"function": "rollmill.data.verifiers:rows", "options": HERE},
        "workflow": {"name": "verifiers", **HERE},
        "rollout": {"batch": 4, "group_size": 4, "max_new_tokens": 2},
        "algorithm": {"name": "grpo", "drop_uniform_groups": False},
        "trainer": {"lr": 1e-3, "precision": "fp32"},
        "steps": 2,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    rollmill.run(path, out=tmp_path / "run")
    found = rollmill.load_experiences(tmp_path / "run", 2)
    assert len(found) == 16
    for one in found:
        assert [turn.role for turn in one.turns] == ["prompt", "assistant"]
        assert one.prompt.startswith("system:\nAdd.\n\nuser:\n")
        assert set(one.reward_parts) == {"right", "short"}
        right = one.prompt.split("user:\n")[1].split("+")[0]
        assert one.reward_parts["right"] == 2.0 * (str(int(right) + 1) in one.response)
        assert one.reward == sum(part or 0.0 for part in one.reward_parts.values())
        assert (one.versions[one.action_mask] == 1).all()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["episode/words"] >= 0 and row["logprob_gap/max"] < 1e-4 for row in rows[-2:])
