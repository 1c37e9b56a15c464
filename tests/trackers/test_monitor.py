from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.run_factory import STAGES, evaluation_metrics, make_run, rollouts, training_metrics

from rollmill.config.monitor import MonitorConfig
from rollmill.errors import RollmillError
from rollmill.orchestrator.monitor import Monitor
from rollmill.trackers import PlainView, peak_rss_mb, read_metrics, read_summary, stored_steps, write_summary


def monitor(run: Path, **config: object) -> Monitor:
    view = PlainView((run / "log.txt").open("a"))
    return Monitor(run, "demo", STAGES, MonitorConfig.model_validate(config), view)


def test_a_run_directory_holds_what_the_contract_says(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=30)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(31))
    assert [row["step"] for row in rows if "eval/greedy" in row] == list(range(0, 31, 5))
    assert stored_steps(run) == list(range(1, 31))
    assert read_summary(run)["seconds_by_stage"] == {"sft": 16.6, "rl": 38.4}
    assert (run / "report.html").stat().st_size > 10_000


def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, broken = make_run(tmp_path / "whole", steps=30), tmp_path / "broken"
    broken.mkdir()

    def steps(watch: Monitor, first: int, last: int) -> None:
        rng = np.random.default_rng(0)
        for step in range(1, last + 1):
            metrics, some = training_metrics(rng, step), rollouts(rng, step) if step > STAGES[0][1] else []
            if step >= first:
                watch.step(metrics, some)
                if step % 5 == 0:
                    watch.evaluation(evaluation_metrics(step))

    killed = monitor(broken)
    killed.evaluation(evaluation_metrics(0))
    steps(killed, 1, 27)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 28, "los')  # killed while writing
    resumed = monitor(broken)
    resumed.resume_at(25)
    steps(resumed, 26, 30)
    resumed.close({})
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    for path in (whole / "rollouts").iterdir():
        assert (broken / "rollouts" / path.name).read_bytes() == path.read_bytes()
    assert stored_steps(broken) == stored_steps(whole)
    assert "resumed after step 25" in (broken / "log.txt").read_text()


def test_configuration_chooses_what_is_stored(tmp_path: Path) -> None:
    watch = monitor(tmp_path, rollouts_every=3, report=False)
    rng = np.random.default_rng(0)
    for step in range(1, 8):
        watch.step(training_metrics(rng, step), rollouts(rng, step))
    watch.close({"ok": True})
    assert stored_steps(tmp_path) == [3, 6]
    assert not (tmp_path / "report.html").exists()


def test_a_failed_run_leaves_neither_summary_nor_report(tmp_path: Path) -> None:
    watch = monitor(tmp_path)
    watch.message("going well")
    watch.close()
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "report.html").exists()


def test_tensorboard_gets_scalars_and_completions_and_survives_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rng = np.random.default_rng(0)
    watch = monitor(tmp_path, tensorboard=True, report=False)
    for step in (21, 22, 23):
        watch.step(training_metrics(rng, step) | {"kl": None}, rollouts(rng, step))
    watch.resume_at(21)
    last = training_metrics(rng, 22)
    watch.step(last, rollouts(rng, 22))
    watch.evaluation(evaluation_metrics(22))
    watch.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [one.step for one in events.Scalars("reward/mean")] == [21, 22]
    assert events.Scalars("reward/mean")[-1].value == pytest.approx(last["reward/mean"])
    assert events.Scalars("eval/greedy")[0].value == pytest.approx(evaluation_metrics(22)["eval/greedy"])
    (text, *_) = events.Tensors("completion/0/text_summary")
    assert b"    What is " in text.tensor_proto.string_val[0]


def test_the_summary_is_valid_json_whatever_it_holds(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"a": float("nan"), "b": np.float32(0.5), "c": {"d": (1, 2)}, "path": Path("x")})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "a": None,
        "b": 0.5,
        "c": {"d": [1, 2]},
        "path": repr(Path("x")),
    }


def test_a_summary_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(RollmillError, match=r"cannot write .*summary\.json"):
        write_summary(tmp_path, {})
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.slow
def test_peak_memory_counts_this_process_and_finished_children() -> None:
    before = peak_rss_mb()
    assert 10 < before < 1e6
    megabytes = int(before) + 100
    subprocess.run([sys.executable, "-c", f"x = bytearray({megabytes} << 20); x[::4096] = x[::4096]"], check=True)
    assert peak_rss_mb() >= megabytes
