"""`rollmill checkpoints`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from support.tiny import tiny_run

import rollmill
from rollmill.cli import main
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.trackers.run_views import PlainView

SHORT = {
    "stages": None,
    "algorithm": {"name": "sft", "batch": 4},
    "steps": 3,
    "evaluation": None,
    "rewards": None,
    "rollout": None,
    "checkpoint": {"every": 1, "keep_last": 3},
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run with three checkpoints."""
    rollmill.run(tiny_run(tmp_path, **SHORT), out=tmp_path / "out", view=PlainView(io.StringIO()))
    capsys.readouterr()
    return tmp_path / "out"


def test_whole_damaged_and_set_aside_ones_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(run)]) == 0
    header, *rows = (re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines())
    assert header == ["checkpoint", "size", "written", "format", "rollmill", "state"]
    assert [(row[0], row[3], row[4], row[5]) for row in rows] == [
        (f"step-00000{step}", "1", rollmill.__version__, "complete") for step in (1, 2, 3)
    ]
    assert main(["checkpoints", str(run), "--verify"]) == 0
    assert capsys.readouterr().out.count("whole") == 3

    weights = run / "checkpoints/step-000002/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (run / "checkpoints/step-000003/tokenizer.json").unlink()
    Checkpoints(run).move_aside(3)
    assert main(["checkpoints", str(run)]) == 0, "contents are read with --verify only"
    capsys.readouterr()
    assert main(["checkpoints", str(run), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "step-000002: model.safetensors has other content than was written" in out
    assert "damaged-000003: tokenizer.json is missing" in out
    assert main(["checkpoints", str(run), "--verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["verified"]) == (str(run), True)
    assert [(each["name"], each["step"], each["state"]) for each in found["checkpoints"]] == [
        ("step-000001", 1, "whole"),
        ("step-000002", 2, "damaged"),
        ("damaged-000003", 3, "set aside"),
    ]
    assert found["checkpoints"][0]["bytes"] > weights.stat().st_size


def test_a_folder_without_a_run_or_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("name: mine\n")
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert "has no checkpoint yet" in capsys.readouterr().out
