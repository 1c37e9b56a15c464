"""The matrix of features and modes says what `rollmill check` does, and names tests that exist."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from rollmill.cli import main
from rollmill.config.checks.modes import FEATURES, RUN_MODES, Deployment, MatrixCell, iter_cells, merge_settings
from rollmill.config.loader import load_run
from rollmill.errors import ConfigError

pytestmark = pytest.mark.net
ROOT = Path(__file__).resolve().parents[2]
BASE = {"model": {"new": {"hidden_size": 64}}, "taskset": {"path": "tasks.jsonl"}, "rewards": [{"name": "math"}]}
CELLS = list(iter_cells())
PLAY = """
import rollmill

@rollmill.workflow
async def play(task, policy, judge):
    return await judge(await policy.role("first").complete(task.prompt))


@rollmill.workflow
async def duel(task, policy, judge, opponent):
    return await judge(await policy.complete(task.prompt))
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("model").mkdir()
    Path("play.py").write_text(PLAY)
    Path("seeing").mkdir()
    Path("seeing/config.json").write_text('{"model_type": "llava"}')


def check(cell: MatrixCell) -> None:
    """Check a run file that asks for the feature in the cell's mode."""
    settings = merge_settings(BASE, cell.settings)
    if settings["model"].get("new", 0) is None:
        del settings["model"]["new"]
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    load_run(Path("run.yaml"))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.title)
def test_what_the_matrix_says_is_what_check_does(feature: object) -> None:
    for cell in [each for each in CELLS if each.feature is feature]:
        if cell.reason is None:
            check(cell)
            continue
        with pytest.raises(ConfigError) as caught:
            check(cell)
        assert cell.reason in str(caught.value), cell.mode.id


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    """Its function does; those with a parameter get it from RUN_MODES by `mode_params`."""
    for cell in CELLS:
        if cell.test is None:
            continue
        path, _, name = cell.test.partition("::")
        function = functions_of(ROOT / path).get(name.partition("[")[0])
        assert function is not None, cell.test
        assert "mode" in {argument.arg for argument in function.args.args}, cell.test


def test_drafts_are_tested_where_they_work() -> None:
    working = [cell.mode for cell in CELLS if cell.feature.key == "rollout.reuse" and cell.test]
    assert working == [mode for mode in RUN_MODES if mode.deployment in (Deployment.ONE_PROCESS, Deployment.RANKS)][:2]


def test_the_page_is_current() -> None:
    done = subprocess.run([sys.executable, "docs/mode_matrix.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--matrix"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [re.split(" {2,}", line) for line in lines]
    assert table[1][1:3] == ["one process, native", "processes, native"]
    assert ["token budget, partial rollouts", *["works"] * 8] in table
    assert any(line.startswith("a: drafts belong to checkpoints") for line in lines)
    assert main(["check", "--matrix", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert len(cells) == len(FEATURES) * len(RUN_MODES)
    assert all((each["test"] is None) != (each["refused"] is None) for each in cells)
    assert main(["check", "--matrix", "run.yaml"]) == 2
