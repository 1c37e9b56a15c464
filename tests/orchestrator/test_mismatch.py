"""Engine/trainer mismatch in whole runs: at every step of every mode, and a wrong engine is seen at every one."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks, forks
from support.tiny import metrics, outcome, ran, tiny_run

from rollmill.errors import TrainingError
from rollmill.launch import resume
from rollmill.trainer.mismatch import LogprobComparison

RL: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "trainer": {"lr": 1e-3},
    "evaluation": None,
    "steps": 6,
    "max_staleness": 2,
}
EXACT, WRONG = 1e-4, 1e-2
"""In fp32 log-probs differ by less; of a wrong engine by more."""
HOTTER = """
from dataclasses import replace

from rollmill.engines.native import NativeEngine


def hotter(asked):
    def of_request(self, request):
        return asked(self, replace(request, sampling=request.sampling.model_copy(update={"temperature": 1.5})))

    return of_request


NativeEngine.generate = hotter(NativeEngine.generate)
NativeEngine.stream = hotter(NativeEngine.stream)
"""
PERTURBED = """
from rollmill.engines.native.weights import EngineWeights

refresh = EngineWeights.refresh


def perturbed(self):
    stale = self._stale
    refresh(self)
    for twin, _ in self._copies if stale else []:
        twin.mul_(1.1)


EngineWeights.refresh = perturbed
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the engines of this process wrong, until the test ends."""

    def make_wrong(code: str) -> None:
        from rollmill.engines.native import NativeEngine
        from rollmill.engines.native.weights import EngineWeights

        monkeypatch.setattr(NativeEngine, "generate", NativeEngine.generate)
        monkeypatch.setattr(NativeEngine, "stream", NativeEngine.stream)
        monkeypatch.setattr(EngineWeights, "refresh", EngineWeights.refresh)
        exec(code, {})

    return make_wrong


def require_measured(run: Path, steps: int = 6, *, wrong: bool = False) -> list[dict[str, Any]]:
    """Every step says the mismatch of its own tokens, and the drift; the steps."""
    rows = [row for row in metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["staleness/max"] for row in rows) > 0
    for row in rows:
        assert row["logprob_gap/tokens"] > 0
        assert (row["logprob_gap/mean"] > WRONG) is wrong
        assert wrong or row["logprob_gap/max"] < EXACT
        assert row["policy_drift/max"] >= row["policy_drift/mean"] >= abs(row["policy_drift/k1"])
        assert row["policy_drift/max"] > 10 * EXACT or not row["staleness/max"]
    assert wrong or rows[0]["policy_drift/max"] < EXACT  # on-policy
    return rows


VARIANTS: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "partials": {"rollout": {"token_budget": 90}},
    "replay": {"buffer": {"replay": {"groups": 2}}, "pipeline": [{"name": "group_variance"}]},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_step_of_an_asynchronous_run_says_its_mismatch_and_drift(tmp_path: Path, variant: str) -> None:
    require_measured(ran(RL, tmp_path, "run", **VARIANTS[variant]))


@pytest.mark.parametrize(("code", "precision"), [(HOTTER, "fp32"), (PERTURBED, "bf16")])
def test_a_wrong_engine_is_seen_at_every_step(tmp_path: Path, engine: Any, code: str, precision: str) -> None:
    engine(code)
    require_measured(ran(RL, tmp_path, "run", trainer={"lr": 1e-3, "precision": precision}), wrong=True)


@pytest.mark.parametrize("chosen", ["fp32", "bf16", "on"])
def test_a_wrong_engine_ends_the_run_in_fp32_unless_the_user_goes_on(tmp_path: Path, engine: Any, chosen: str) -> None:
    engine(HOTTER.replace("1.5", "9"))
    keys: dict[str, Any] = {"trainer": {"lr": 1e-3, "precision": "bf16" if chosen == "bf16" else "fp32"}}
    if chosen == "on":
        keys["monitor"] = {"stop_on_mismatch": False}
    if chosen == "fp32":
        with pytest.raises(TrainingError, match=r"in 3 steps in a row.*nats per token.*stop_on_mismatch: false"):
            ran(RL, tmp_path, "run", **keys)
    else:
        ran(RL, tmp_path, "run", **keys)
    run = tmp_path / "run" / "out"
    rows = [row for row in metrics(run) if "loss" in row]
    assert len(rows) == (3 if chosen == "fp32" else 6)
    assert all(row["logprob_gap/mean"] > 0.1 for row in rows)
    events = run / "events.jsonl"
    told = [line for line in events.read_text().splitlines() if "nats" in line] if events.exists() else []
    assert len(told) == (chosen == "on")


@pytest.mark.slow
def test_comparing_changes_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = outcome(ran(RL, tmp_path, "with"))
    monkeypatch.setattr(LogprobComparison, "choose", lambda *args: [])
    without = outcome(ran(RL, tmp_path, "without"))
    for made in (with_it, without):
        made["metrics"] = [
            {key: value for key, value in row.items() if not key.startswith("logprob_gap/")} for row in made["metrics"]
        ]
    assert with_it == without


@pytest.mark.slow
def test_a_resumed_run_says_the_same(tmp_path: Path) -> None:
    whole = ran(RL, tmp_path, "whole", checkpoint={"every": 1, "keep_last": 9})
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    (cut / "summary.json").unlink()
    for path in (cut / "checkpoints").iterdir():
        if int(path.name.rpartition("-")[2]) > 3:
            shutil.rmtree(path)
    resume(cut)
    require_measured(cut)
    expected, found = outcome(whole), outcome(cut)
    assert found == expected


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("transport", "wrong"), list(itertools.product(("memory", "folder", "broadcast"), (False, True)))
)
def test_every_step_says_it_on_ray(server: Forks, tmp_path: Path, transport: str, wrong: bool) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    (tmp_path / "wrong.py").write_text(HOTTER if wrong else "")
    placement = {"name": "ray", "explorers": 1, "weights": transport}
    tiny_run(tmp_path, **RL, plugins=["wrong.py"], placement=placement)
    done = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert done.code == 0, done.err + done.out
    require_measured(tmp_path / "out", wrong=wrong)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wrong", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_every_step_says_it_with_an_explorer_of_its_own(server: Forks, tmp_path: Path, wrong: bool) -> None:
    (tmp_path / "wrong.py").write_text(HOTTER if wrong else "")
    tiny_run(tmp_path, **RL, plugins=["wrong.py"])
    with forks() as explorer:
        for process, mode in ((explorer, "explore"), (server, "train")):
            process.start("run", "run.yaml", "--set", f"mode={mode}", "--out", "out", folder=tmp_path)
        for process in (server, explorer):
            done = process.wait()
            assert done.code == 0, done.err + done.out
    require_measured(tmp_path / "out", wrong=wrong)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sharding", ["tensor", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("none", "fsdp"))]
)
def test_ranks_say_it_together(tmp_path: Path, sharding: str) -> None:
    trainer = {"lr": 1e-3, "ranks": 2, "sharding": sharding}
    model = {"new": {"kv_heads": 2}}  # one for each rank
    require_measured(ran(RL, tmp_path, "run", model=model, trainer=trainer, steps=4), steps=4)


def test_a_synchronous_run_compares_all_tokens(tmp_path: Path) -> None:
    rows = [row for row in metrics(ran(RL, tmp_path, "run", max_staleness=0, steps=2)) if "loss" in row]
    for row in rows:
        assert row["logprob_gap/tokens"] == row["tokens"]
        assert row["policy_drift/max"] == row["logprob_gap/max"] < EXACT
