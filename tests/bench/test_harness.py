"""The benchmarks' own machinery, with real worker processes."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import models
from bench.harness import ROOT, BenchError, Measured, Side, Worker, run_in_turn, vllm_python
from bench.ours.experiences import experiences
from bench.packing import lengths
from bench.peers.memory import resident, with_peak
from bench.peers.rollouts import rollouts
from bench.peers.trl_learn import right
from bench.prefix import token_ratio
from bench.report import Case, finish
from rollmill.rewards.builtin.exact import ExactReward
from rollmill.types import Completion, StopReason, Task

WORKER = """
import os, sys, time
from bench.worker import Channel, serve, versions
channel = Channel()
print("libraries may print")
if sys.argv[1] == "dies":
    raise RuntimeError("out of luck")
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), 9)
if sys.argv[1] == "sleeps":
    time.sleep(60)
with open(sys.argv[2], "a") as log:
    def run():
        print(sys.argv[1], file=log, flush=True)
        return {"seconds": 1.0, "cores": len(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"]}
    serve(channel, run, pid=os.getpid(), versions=versions("pytest"))
"""


def side(tmp_path: Path, name: str) -> Side:
    (tmp_path / "toy_worker.py").write_text(WORKER)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return Side(name, "toy_worker", (name, str(tmp_path / "log")), env={"PYTHONPATH": path})


def test_workers_are_measured_in_alternating_turn_each_on_one_core(tmp_path: Path) -> None:
    measured = run_in_turn([side(tmp_path, "a"), side(tmp_path, "b")], rounds=2, warmups=1, deadline_s=30)
    assert (tmp_path / "log").read_text().split() == ["a", "b", "b", "a", "a", "b"]
    assert [len(one.rounds) for one in measured] == [2, 2]
    assert {(round_["cores"], round_["threads"]) for one in measured for round_ in one.rounds} == {(1, "1")}


def test_a_worker_is_stopped_between_its_runs(tmp_path: Path) -> None:
    worker = Worker(side(tmp_path, "a"), 30)
    try:
        worker.run()
        state = Path(f"/proc/{worker.ready['pid']}/stat")
        if not state.exists():
            pytest.skip("no /proc")
        while (letter := state.read_text().rsplit(")", 1)[1].split()[0]) not in "Tt":
            assert letter in "RSD"
        assert worker.run()["seconds"] == 1.0
    finally:
        worker.close()


def test_a_worker_that_dies_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"(?s)dies ended with exit code 1.*RuntimeError: out of luck"):
        run_in_turn([side(tmp_path, "dies")], rounds=1, deadline_s=30)


def test_a_worker_that_is_killed_is_reported_with_the_likely_reason(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"is killed ended with exit code -9 \(killed: most likely, memory ran out\)"):
        run_in_turn([side(tmp_path, "is killed")], rounds=1, deadline_s=30)


def test_a_silent_worker_is_given_up_by_name(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="sleeps: no answer within 1 s"):
        run_in_turn([side(tmp_path, "sleeps")], rounds=1, deadline_s=1)


def test_ratio_is_above_one_where_ours_is_better() -> None:
    faster = Case("x", "peer", "s", ours=[1.0, 2.0], peer=[2.0, 8.0], higher_is_better=False)
    higher = Case("x", "peer", "tokens/s", ours=[20.0, 5.0], peer=[10.0, 8.0], higher_is_better=True)
    assert faster.ratios == [2.0, 4.0]
    assert higher.ratios == [2.0, 0.625]
    assert (faster.best_ratio, higher.best_ratio) == (2.0, 2.0)


def test_the_line_is_the_worst_case_and_the_file_has_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Case("good", "peer", "s", ours=[1.0, 1.0, 1.0], peer=[2.0, 3.0, 4.0], higher_is_better=False)
    bad = Case("bad", "peer", "s", ours=[1.0], peer=[0.5], higher_is_better=False)
    finish("toy", [good, bad], versions={}, only_json=True, folder=tmp_path)
    line = json.loads(capsys.readouterr().out)
    assert {"bench", "ours", "peer", "unit", "ratio", "ratio_min", "ratio_max", "threads", "machine"} <= set(line)
    assert (line["case"], line["ratio"]) == ("bad", 0.5)
    cases = json.loads((tmp_path / "toy.json").read_text())["cases"]
    assert [(case["ratio_min"], case["ratio"], case["ratio_max"]) for case in cases] == [(2, 3, 4), (0.5, 0.5, 0.5)]


def test_results_before_the_end_are_in_the_file_and_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Case("first", "peer", "s", ours=[1.0], peer=[2.0], higher_is_better=False)
    finish("toy", [first], versions={}, only_json=False, folder=tmp_path, done=False)
    assert [case["case"] for case in json.loads((tmp_path / "toy.json").read_text())["cases"]] == ["first"]
    assert capsys.readouterr().out == ""


def test_a_missing_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLMILL_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(BenchError, match=r"install_vllm\.sh"):
        vllm_python()


def test_an_unknown_benchmark_is_wrong_usage() -> None:
    done = subprocess.run([sys.executable, "-m", "bench", "nope"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "rollout" in done.stderr


@pytest.mark.parametrize(("name", "millions"), [("m3", 3.2), ("m25", 24.9), ("m600", 596.0)])
def test_model_sizes(name: str, millions: float) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**models.SHAPES[name]._asdict(), tie_word_embeddings=True))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_prompts_are_the_same_every_time_and_in_the_vocabulary() -> None:
    first = models.prompts("m3", 5, 20)
    assert first == models.prompts("m3", 5, 20)
    assert all(len(ids) == 20 and min(ids) > 0 and max(ids) < models.SHAPES["m3"].vocab_size for ids in first)


def test_made_up_rollouts_have_the_lengths_that_were_asked_for_and_become_experiences() -> None:
    made_up = rollouts(50, [(3, [2, 5]), (4, [1])])
    assert made_up == rollouts(50, [(3, [2, 5]), (4, [1])])
    assert [(len(prompt), [len(ids) for ids in completions]) for prompt, completions in made_up] == [
        (3, [2, 5]),
        (4, [1]),
    ]
    batch = experiences(made_up, 50)
    assert [one.group for one in batch] == ["0", "0", "1"]
    assert batch[1].token_ids.tolist() == made_up[0][0] + made_up[0][1][1]
    assert batch[1].action_mask.tolist() == [False] * 3 + [True] * 5
    assert {int(token) for one in batch for token in one.token_ids} <= set(range(1, 50))


def test_lengths_of_packing_are_log_normal_and_capped() -> None:
    drawn = lengths(4000, 64, 512)
    completions = [completion for _, (completion,) in drawn]
    assert np.median(completions) == pytest.approx(64, rel=0.05)
    assert np.std(np.log(completions)) == pytest.approx(0.8, rel=0.05)
    assert (max(completions), min(prompt for prompt, _ in drawn), max(prompt for prompt, _ in drawn)) == (512, 8, 64)
    assert lengths(64, 64, 512) == lengths(64, 64, 512)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
def test_peak_memory_is_that_of_the_call() -> None:
    def use(mib: int) -> int:
        # From the system: an array may lie in memory that an earlier test freed and the allocator still holds.
        with mmap.mmap(-1, mib * 2**20) as memory:
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1
            return len(memory)

    use(256)
    before = resident()
    total, peak = with_peak(lambda: use(64))
    assert total == 64 * 2**20
    assert peak - before == pytest.approx(64 * 2**20, abs=8 * 2**20)


def test_sides_that_compute_something_else_are_not_compared() -> None:
    ready, round_ = {"dtype": "fp32"}, {"loss": 2.0, "grad_norm": 1.0, "tokens": 10}
    ours = Measured("ours", ready, [round_])
    assert token_ratio(ours, Measured("peer", ready, [{**round_, "tokens": 35}])) == 3.5
    with pytest.raises(AssertionError, match="grad_norm"):
        token_ratio(ours, Measured("peer", ready, [{**round_, "grad_norm": 1.1}]))


def completion(text: str) -> Completion:
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=0)


@given(st.text("12# ", max_size=8))
def test_both_sides_of_learn_have_the_same_reward(text: str) -> None:
    exact = ExactReward(name="exact", after="#")
    verdict = asyncio.run(exact.score(Task(id="0", prompt="", answer="12"), completion(text)))
    assert right(text, "12") == verdict.value
