"""One run that survives, in one go, what usually comes one at a time."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from support.forks import send
from support.vllm_service import needs_vllm

from faults.board import learned
from faults.damage import flip, newest
from faults.on_vllm import vllm_process
from faults.scene import GROUPS, MODES, SIZE, Scene, Services
from faults.user_code import Judge
from rollmill.trackers.event_log import read_events

STEPS = 10


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=[pytest.mark.service, needs_vllm])])
def test_judge_engine_lock_checkpoint_and_trainer_fail_in_one_run(tmp_path: Path, engine: str) -> None:
    services = Services(tmp_path)
    scene = Scene(services, tmp_path / "run", MODES["processes"], "sqlite")
    if engine == "vllm":
        scene.write(**MODES["vllm"].changes)
    with scene.cleanup:
        scene.cleanup.callback(services.close)
        scene.cleanup.callback(scene.close)
        said = _survive(scene, engine)
    run = scene.out
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    assert scene.tries == 1, "nobody had to resume it"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ids = [one[0] for one in learned(run)]
    assert len(ids) == len(set(ids)) == STEPS * GROUPS * SIZE
    if engine == "native":  # the stopped one was replaced in steps that were made again
        assert sum(row.get("explorer/replaced", 0) for row in rows) >= 1
    assert sum(row.get("judging/judge/retries", 0) for row in rows) > 0
    assert list((run / "checkpoints").glob("damaged-*"))
    damage = ("the checkpoint of step 8 is damaged (model.safetensors", "step 6, the newest one that is whole")
    for text in (*damage, "killed by SIGKILL", "restart 1 of 3"):
        assert text in said, said
    lost = {"native": "explorer 1 is lost", "vllm": "vLLM&#39;s process has ended (by signal 9); it is started again"}
    story = ("answers again after", lost[engine], "explorer 0 is lost", *damage, "was killed by SIGKILL")
    report = (run / "report.html").read_text()
    for text in story:
        assert text in report, read_events(run)


def _survive(scene: Scene, engine: str) -> str:
    """Hurt a run in five ways, and see it to its end; returns what the trainer's command said."""
    judge = Judge(scene)
    noted = {"name": "python", "function": "noted", "run_in": "thread"}
    judged = scene.changes["rewards"][0] | {"deadline_s": 120, "away_s": 90}  # a busy machine starts a server slowly
    scene.write(steps=STEPS, rewards=[judged, noted], monitor={"report": True})
    scene.pace(0.05)
    scene.begin()

    scene.wait(lambda: scene.step() >= 2, 500)
    judge.end()
    time.sleep(6)
    judge.start()

    scene.wait(lambda: scene.step() >= 4, 500)
    explorer = scene.process("explorer 1")
    scene.signal(explorer if engine == "native" else vllm_process(explorer, "worker"))

    scene.wait(lambda: scene.step() >= 6, 500)
    stopped = scene.process("explorer 0")  # it holds explorers/0.lock
    scene.signal(stopped, signal.SIGSTOP)
    scene.keep_explorers()  # one that was killed

    scene.wait(lambda: scene.step() >= 8 and newest(scene.out).name == "step-000008", 500)
    flip(newest(scene.out) / "model.safetensors")
    scene.signal(scene.process("trainer"))
    end = scene.finish(600, resumes=True)
    send(stopped, signal.SIGCONT)
    assert end is not None, "the run does not end"
    assert end.code == 0, end.err
    assert scene.explorers_end() == [0, 0]
    return end.out + end.err
