from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from support.run_factory import make_run
from typer.testing import CliRunner

from rollmill.cli.show import command
from rollmill.errors import ConfigError
from rollmill.trackers import load_experiences

CHILD = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", "COLUMNS": "100"}
CHILD.pop("NO_COLOR", None)

app = typer.Typer()
app.command()(command)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=30)


def show(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_overview_lists_metrics_evaluations_and_checkpoints(run: Path) -> None:
    shown = show(run)
    assert f"run {run}: 30 steps" in shown
    assert "checkpoints: step-30" in shown
    assert "experiences: 30 steps, 1 to 30" in shown
    lines = shown.splitlines()
    assert any(line.split() == ["stage", "rl"] for line in lines)
    assert any(line.split()[:4] == ["10", "sft", "0.18", "0.15"] for line in lines)
    table = lines[lines.index("Evaluations") + 1 :]
    assert table[0].startswith("step  stage  eval/")
    assert {line.index(line.split()[2], 6) for line in table} == {table[0].index("eval/")}, "columns are aligned"
    overview = json.loads(show(run, "--json"))
    assert overview["steps"] == 30
    assert overview["last"]["step"] == 30
    assert [row["step"] for row in overview["evaluations"]] == [0, 5, 10, 15, 20, 25, 30]
    assert overview["summary"]["accuracy_after"] == 1.0


def test_a_step_lists_its_experiences(run: Path) -> None:
    shown = show(run, "--step", 25).splitlines()
    assert shown[1].split() == ["id", "task", "reward", "tokens", "stop", "source", "response"]
    assert shown[2].split()[:2] == ["sum-100/0", "sum-100"]
    listed = json.loads(show(run, "--step", 25, "--json"))
    assert [(one["id"], one["reward"]) for one in listed] == [(one.id, one.reward) for one in load_experiences(run, 25)]
    assert "learned from no experiences" in show(run, "--step", 3)


def test_a_task_prints_its_completions(run: Path) -> None:
    (first, *_) = load_experiences(run, 25, "sum-100")
    shown = show(run, "--step", 25, "--task", "sum-100")
    assert f"== sum-100/0 (step 25): reward {first.reward:g}" in shown
    assert f"{first.prompt}{first.response}\n" in shown
    assert "\x1b" not in shown
    assert show(run, "--task", "sum-100") == shown


def test_the_token_table_has_one_line_per_token(run: Path) -> None:
    (first, *_) = load_experiences(run, 25, "sum-100")
    lines = show(run, "--step", 25, "--task", "sum-100", "--tokens").splitlines()
    assert lines[1].split() == ["index", "id", "text", "logprob", "version", "mask", "advantage"]
    prompt, action = lines[2].split(), lines[2 + len(first.prompt)].split()
    assert prompt == ["0", "55", "'W'", "0", "-1", "0", "0"]
    assert action[:3] == [str(len(first.prompt)), "33", "'A'"]
    assert action[4:6] == ["24", "1"]
    assert float(action[3]) == pytest.approx(first.logprobs[len(first.prompt)], rel=1e-5)


def test_json_of_a_task_holds_every_number(run: Path) -> None:
    (first, *_) = load_experiences(run, 25, "sum-100")
    (shown, *_) = json.loads(show(run, "--step", 25, "--task", "sum-100", "--json"))
    assert np.array_equal(np.array(shown["logprobs"], np.float32), first.logprobs)
    assert "".join(shown["token_texts"]) == first.prompt + first.response


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "31"], r"no experiences of step 31\. Stored: 30 steps from 1 to 30; nearest 28, 29, 30"),
        (["--step", "25", "--task", "sum-109"], r"no experience of task 'sum-109' in step 25\. Nearest: .*sum-10\d"),
        (["--task", "sum-1000"], r"task 'sum-1000' in any of its 30 stored steps\. Nearest: sum-100"),
        (["--tokens"], r"--tokens is honoured only with --task"),
        (["--colour", "pink"], r"--colour is advantage or logprob, not 'pink'"),
    ],
)
def test_wrong_arguments_get_the_nearest_right_ones(run: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        show(run, *arguments)
    assert caught.value.exit_code == 2


def test_a_wrong_run_gets_the_nearest_right_one(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"demmo is no folder\. Runs found there: .*demo\."):
        show(run.with_name("demmo"))


def test_a_terminal_gets_colours_but_no_codes_of_the_model(run: Path) -> None:
    program = "import typer; from rollmill.cli.show import command; typer.run(command)"
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(run), "--step", "25", "--task", "sum-100"], stdout=slave, env=CHILD
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert child.wait() == 0
    assert b"\x1b[37;48;" in shown


def test_importing_the_command_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, rollmill.cli.show; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, env=CHILD)
