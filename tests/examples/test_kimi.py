"""examples/kimi.yaml: four domains learn together, with partial rollouts, replay, curricula and kimi's algorithm.

The policy sees the pictures of one of them.
"""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks, forks, send
from support.tiny import outcome
from support.waiting import wait_until

from rollmill.cli import main
from rollmill.user_code import import_object

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kimi.yaml"
DOMAINS = ("math", "code", "school", "pictures")
SHORT = [
    "stages.0.steps=10",
    "stages.0.evaluation.every=10",
    "stages.0.trainer.warmup_steps=2",
    "stages.1.steps=6",
    "stages.1.rollout.token_budget=120",
    "rollout.batch=8",
    "rollout.group_size=4",
    "evaluation.every=3",
    "checkpoint.every=2",
    *(f"domains.{name}.evaluation.limit=4" for name in DOMAINS),
]
RAY = ["placement={name: ray, explorers: 2}"]


def settings(*given: str) -> list[str]:
    return [word for each in given for word in ("--set", each)]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the example's model."""
    import_object(f"{EXAMPLE.with_suffix('.py')}:write_checkpoint")(tmp_path / "models/kimi")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_each_domains_right_answer_earns_exactly_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taught = settings(
        *(f"domains.{name}.taskset.options.forgetful=0" for name in DOMAINS)
    )  # solutions without mistakes
    main(["audit", str(EXAMPLE), "--stage", "kimi", "--tasks", "4", *taught])
    told = capsys.readouterr().out
    for name in DOMAINS:
        [line] = [each for each in told.splitlines() if f"{name}/oracle" in each]
        assert line.startswith("ok")
        assert "the right answer earns the full reward of 1 on all 4 tasks" in line


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_killed_it_ends_as_if_nothing_had_happened(server: Forks, folder: Path, kills: int) -> None:
    once = server.run("run", EXAMPLE, "--out", "once", *settings(*SHORT), folder=folder)
    assert once.code == 0, once.err
    killed = folder / "killed"
    command: list[Any] = ["run", EXAMPLE, "--out", "killed", *settings(*SHORT, "supervise.restarts=0")]
    for step in (12, 14)[:kills]:
        server.start(*command, folder=folder)
        checkpoint = killed / f"checkpoints/step-{step:06d}"
        wait_until(checkpoint.is_dir, 400)
        send(server.pid)
        assert server.wait().code == -signal.SIGKILL
        command = ["resume", "killed"]
    ended = server.run(*command, folder=folder)
    assert ended.code == 0, ended.err
    assert outcome(killed) == outcome(folder / "once")
    trained = [row for row in rows(killed) if row.get("stage") == "kimi" and "loss" in row]
    assert sum(row["rollout/partial"] for row in trained) > 0
    assert any("replay/age" in row for row in trained)
    assert {name for row in trained for name in DOMAINS if f"domain/{name}/reward" in row} == set(DOMAINS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("place", "kills"),
    [
        ("processes", 1),
        pytest.param("processes", 2, marks=pytest.mark.thorough),
        pytest.param("ray", 2, marks=[pytest.mark.service, pytest.mark.thorough]),
    ],
)
def test_two_explorers_go_on_after_its_trainer_was_killed(server: Forks, folder: Path, place: str, kills: int) -> None:
    given = settings(*SHORT, "supervise.restarts=0", *({"ray": RAY, "processes": ["mode=train"]}[place]))
    command: list[Any] = ["run", EXAMPLE, "--out", "out", *given]
    with ExitStack() as stack:
        explorers = [stack.enter_context(forks()) for _ in range(2 if place == "processes" else 0)]
        for each in explorers:
            explore = settings(*SHORT, "supervise.restarts=0", "mode=explore")
            each.start("run", EXAMPLE, "--out", "out", *explore, folder=folder)
        for step in (12, 14)[:kills]:
            server.start(*command, folder=folder)
            assert server.reaches((folder / f"out/checkpoints/step-{step:06d}").is_dir, 600), server.wait().err
            send(server.pid)
            assert server.wait().code == -signal.SIGKILL
            command = ["resume", "out"]
        ended = server.run(*command, folder=folder)
        assert ended.code == 0, ended.err
        for each in explorers:
            done = each.wait()
            assert done.code == 0, done.err
    trained = [row for row in rows(folder / "out") if row.get("stage") == "kimi" and "loss" in row]
    assert [row["step"] for row in trained] == list(range(11, 17))
    assert sum(row["rollout/partial"] for row in trained) > 0
    assert any("replay/age" in row for row in trained)
    assert {name for row in trained for name in DOMAINS if f"domain/{name}/reward" in row} == set(DOMAINS)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_domain_learns(server: Forks, folder: Path, seed: int) -> None:
    ended = server.run("run", EXAMPLE, "--out", "out", *settings(f"seed={seed}"), folder=folder)
    assert ended.code == 0, ended.err
    evaluated = [row for row in rows(folder / "out") if "eval/math/sampled" in row]
    for name in DOMAINS:
        assert evaluated[-1][f"eval/{name}/sampled"] > evaluated[0][f"eval/{name}/sampled"], name
