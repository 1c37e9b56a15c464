"""The orchestrator's code on virtual time: one seed is one history, and every history keeps the invariants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.sources import PYTHONPATH

from bench.harness import ROOT
from bench.simulation import main
from bench.simulation.scenario import CLUSTERS, Scenario, draw_scenario
from bench.simulation.world import Outcome, simulate_scenario, simulate_seed

FAST = 16


def checked(scenario: Scenario) -> Outcome:
    outcome = simulate_seed(scenario)
    assert outcome.violation is None, (
        f"{outcome.violation}; replay it: python -m bench simulation --seed {scenario.seed}"
    )
    return outcome


@pytest.mark.parametrize("seed", range(FAST))
def test_invariants_hold(seed: int) -> None:
    checked(draw_scenario(seed))


def test_a_seed_is_one_history() -> None:
    digests = {simulate_seed(draw_scenario(7)).digest for _ in range(2)}
    assert len(digests) == 1
    assert simulate_seed(draw_scenario(9)).digest not in digests


def test_a_run_has_the_time_that_its_judges_need() -> None:
    slow = replace(draw_scenario(15), faults=(), judge_s=70.0, judge_places=1)
    assert "waited 300 s for explorers to finish their rollouts" in str(simulate_scenario(slow).violation)
    assert simulate_scenario(slow.with_enough_time()).violation is None


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--first", "3"], only_json=True) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["bench"], line["seeds"], line["failed"]) == ("simulation", 2, [])


@pytest.mark.slow
def test_a_seed_is_one_history_in_any_process() -> None:
    """Whatever the order of sets of strings is there."""
    shown = []
    for hash_seed in ("1", "2"):
        words = [sys.executable, "-m", "bench", "simulation", "--seed", "38"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": PYTHONPATH}
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    assert shown[0] == shown[1]
    assert "every invariant holds" in shown[0]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.thorough])])
def test_invariants_hold_for_many_seeds(count: int) -> None:
    """Scenarios of all kinds are among them, and with 2,000 seeds clusters of up to 1,000 explorers."""
    seen: set[object] = set()
    for seed in range(FAST, FAST + count):
        scenario = draw_scenario(seed)
        checked(scenario)
        seen |= {scenario.placement, scenario.store, scenario.explorers, *(fault.kind for fault in scenario.faults)}
    kinds = {"trainer", "rank", "judge", "database", "explorer", "partition", "slow", "break", "duplicate", "import"}
    clusters = CLUSTERS if count == 2000 else ()  # they are rare
    assert seen >= {"local", "ray", "joined", "memory", "sql", *clusters, *kinds}
