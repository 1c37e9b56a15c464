"""A run that is killed, at whatever moment, and resumed gives exactly what it would have given undisturbed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks, send
from support.postgres import Postgres
from support.tiny import GRPO, SFT, outcome, tiny_run

REPLAY = {"groups": 2, "order": "priority", "priority": "advantage", "max_uses": 3, "decay": 0.8}
REFILLED = {
    "pipeline": [{"name": "group_variance"}],
    "buffer": {"replay": REPLAY},
    "taskset": {"sampler": "prioritised"},
}
MADE = [{"name": "group_variance"}, {"name": "demonstrations", "part": "format", "per_task": 1}, {"name": "duplicates"}]
MIX = {"algorithm": {"name": "mix"}, "trainer": {"lr": 1e-3}, "steps": 6}
GAME = """
import rollmill

@rollmill.workflow
async def game(task, policy, judge, opponent):
    mine = await policy.complete(task.prompt, max_new_tokens=6)
    theirs = await opponent.complete(task.prompt, max_new_tokens=6)
    return await judge(mine), {"theirs": sum(map(ord, theirs.text)) / 1000}
"""
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "one_step_off": {"stages": [SFT, GRPO | {"max_staleness": 1}]},
    "asynchronous": {"stages": [SFT, GRPO | {"max_staleness": 3}]},
    "mix": {"stages": [SFT, GRPO | {"algorithm": {"name": "mix", "kl": 0.01}}]},
    "refilled": {"stages": [SFT, GRPO | {"max_staleness": 1} | REFILLED]},
    "offline_data": {
        "stages": [SFT, MIX | {"name": "mix", "max_staleness": 3, "pipeline": MADE} | {"buffer": {"replay": REPLAY}}]
    },
    "memory": {
        "stages": [SFT, MIX | {"name": "mix", "max_staleness": 1, "pipeline": MADE}],
        "buffer": {"store": "memory", "replay": REPLAY},
    },
    "stores": {
        "stages": [
            SFT,
            GRPO | {"steps": 5, "pipeline": MADE, "max_staleness": 1},
            MIX | {"name": "mix", "offline_data": {"sources": ["run"]}, "buffer": {"store": "memory"}},
            GRPO | {"name": "again", "steps": 4, "buffer": {"replay": REPLAY}},
        ],
    },
    "partials": {"stages": [SFT, GRPO | {"max_staleness": 2, "rollout": {"token_budget": 90}}]},
    "oversampled": {"stages": [SFT, GRPO | {"rollout": {"oversample": 0.75}}]},
    "dapo": {"stages": [SFT, GRPO | {"algorithm": {"name": "dapo"}, "trainer": {"lr": 1e-3, "updates_per_batch": 2}}]},
}


def undisturbed(server: Forks, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Write the run file and run it to its end."""
    tiny_run(folder, **changes)
    ended = server.run("run", "run.yaml", "--out", "whole", folder=folder)
    assert ended.code == 0, ended.err
    found = outcome(folder / "whole")
    assert any(row.get("grad_norm", 0) > 0 and "reward/mean" in row for row in found["metrics"]), "RL moved nothing"
    return found


def killed_and_resumed(server: Forks, folder: Path, out: str, dice: random.Random, kills: int, whole_s: float) -> int:
    """Run to the end, which takes `whole_s` undisturbed, killed up to `kills` times on the way; how often it was."""
    run, killed = folder / out, 0
    while True:
        argv = ("resume", out) if (run / "config.yaml").exists() else ("run", "run.yaml", "--out", out)
        server.start(*argv, folder=folder)
        if killed < kills:
            killed += _kill(server, run, dice, whole_s)
        ended = server.wait()
        if ended.code == 0:
            return killed
        assert ended.code == -signal.SIGKILL, ended.err


def _kill(server: Forks, run: Path, dice: random.Random, whole_s: float) -> bool:
    """At a random moment, or while the next checkpoint after it is being written; False when the run ended before."""
    time.sleep(dice.uniform(0.0, whole_s))
    if dice.random() < 0.4:
        writing = (run / "checkpoints").glob
        if not server.reaches(lambda: any(True for _ in writing(".writing-*"))):
            return False
        time.sleep(dice.uniform(0.0, 0.02))
    return send(server.pid)


def check(server: Forks, folder: Path, variant: str, kills: int, seed: int, **changes: Any) -> None:
    server.run("--version", folder=folder)  # so that imports do not count as time in which a run can be killed
    began = time.monotonic()
    expected = undisturbed(server, folder, VARIANTS[variant] | changes)
    whole_s = time.monotonic() - began
    dice = random.Random(f"{variant}:{seed}")
    total = runs = 0
    while total < kills:
        runs += 1
        total += killed_and_resumed(server, folder, f"killed-{runs}", dice, min(kills - total, 6), whole_s)
        found = outcome(folder / f"killed-{runs}")
        for what, value in expected.items():
            assert found[what] == value, f"{what} differs after {total} kills (run {runs})"


@pytest.mark.slow
def test_two_kills_change_nothing(server: Forks, tmp_path: Path) -> None:
    check(server, tmp_path, "one_step_off", kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_kills_change_no_opponent_that_is_a_past_copy(server: Forks, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(GAME)
    opponent = {"policy": "past", "every": 2, "keep": 2, "latest": 0.3}
    game = GRPO | {"workflow": "game", "models": {"opponent": opponent}, "trainer": {"lr": 0.01}}
    check(server, tmp_path, "grpo", kills=3, seed=5, plugins=["flow.py"], stages=[SFT, game])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_kills_change_nothing(server: Forks, tmp_path: Path) -> None:
    check(server, tmp_path, "grpo", kills=30, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["asynchronous", "stores", "partials"])
def test_kills_change_nothing_in_other_modes(server: Forks, tmp_path: Path, variant: str) -> None:
    check(server, tmp_path, variant, kills=3, seed=3)


@pytest.mark.net
@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_kills_change_nothing_in_any_mode(server: Forks, tmp_path: Path, variant: str) -> None:
    check(server, tmp_path, variant, kills=2, seed=6)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", [each for each in VARIANTS if each != "grpo"])
def test_six_kills_change_nothing_in_any_mode(server: Forks, tmp_path: Path, variant: str) -> None:
    check(server, tmp_path, variant, kills=6, seed=3)


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(600)
def test_kills_change_nothing_in_a_database_on_a_server(server: Forks, tmp_path: Path, pg: Postgres) -> None:
    check(server, tmp_path, "refilled", kills=3, seed=4, buffer={"url": pg.url})
