"""Environments: what is right passes, and what is broken is found by the check that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.apps.audit.findings import Finding, Severity
from rollmill.apps.audit.runner import AuditOptions, run_audit
from rollmill.config import section as parts
from rollmill.config.loader import load_taskset_run
from rollmill.registry import import_object

ENVIRONMENTS = Path(__file__).parents[2] / "support/audit_environments.py"


def findings(folder: Path, environment: str, *, oracle: bool = False) -> dict[str, Finding]:
    rows = [{"prompt": f"Game {n}.", "answer": str(11 * n + 3)} for n in range(6)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "plugins": [str(ENVIRONMENTS)],
        "taskset": {"path": str(folder / "tasks.jsonl")},
        "workflow": {"name": "environment", "turns": 12},
        "environment": {"name": environment, "time_limit_s": 1.0 if environment == "hangs" else 30.0},
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    loaded = load_taskset_run(folder / "run.yaml")
    act = import_object(f"{ENVIRONMENTS}:binary_search") if oracle else None
    found = run_audit(loaded, loaded.stages[0], AuditOptions(oracle=act), lambda text: None)
    return {each.check: each for each in found}


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_registered", dict(parts._registered))
        yield


@pytest.mark.parametrize(
    ("environment", "check", "oracle"),
    [
        ("right", None, True),
        ("begins_anyhow", "environment_reset", False),
        ("rewards_silence", "environment_empty", False),
        ("crashes", "environment_crashes", False),
        ("hangs", "environment_crashes", False),
        ("never_right", "environment_oracle", True),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, environment: str, check: str | None, oracle: bool) -> None:
    found = findings(tmp_path, environment, oracle=oracle)
    bad = [name for name, each in found.items() if each.severity is Severity.PROBLEM and name.startswith("environment")]
    if environment == "rewards_silence":
        bad.remove("environment_strange")  # its actions are empty, too
    assert bad == ([] if check is None else [check])
    assert found["environment_episodes"].numbers["mean_turns"] > 1
    if environment == "hangs":
        assert found["environment_crashes"].numbers["timeouts"] == 6
    if not oracle:
        assert found["environment_oracle"].severity is Severity.SKIPPED
