"""One run that survives, in one go, what usually comes one at a time."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from forks import send

from faults.board import learned
from faults.damage import flip, newest
from faults.scene import GROUPS, MODES, SIZE, Scene, Services
from faults.user_code import Judge

STEPS = 10


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_judge_explorers_lock_checkpoint_and_trainer_fail_in_one_run(tmp_path: Path) -> None:
    services = Services(tmp_path)
    scene = Scene(services, tmp_path / "run", MODES["processes"], "sqlite")
    with scene.cleanup:
        scene.cleanup.callback(services.close)
        scene.cleanup.callback(scene.close)
        said = _survive(scene)
    run = scene.out
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ids = [one[0] for one in learned(run)]
    assert len(ids) == len(set(ids)) == STEPS * GROUPS * SIZE
    assert sum(row.get("explorer/replaced", 0) for row in rows) >= 1
    assert sum(row.get("judging/judge/retries", 0) for row in rows) > 0
    assert list((run / "checkpoints").glob("damaged-*"))
    for text in ("step 8 is damaged", "model.safetensors", "step 6, the newest one that is whole"):
        assert text in said, said
    assert (run / "report.html").stat().st_size > 10_000
    events = run / "events.jsonl"  # where the command starts its trainer again by itself
    assert scene.tries == (1 if events.exists() else 2)


def _survive(scene: Scene) -> str:
    """Hurt a run in five ways, and see it to its end; returns what the trainer's command said."""
    judge = Judge(scene)
    noted = {"name": "python", "function": "noted", "run_in": "thread"}
    scene.write(steps=STEPS, rewards=[*scene.changes["rewards"], noted])
    scene.pace(0.05)
    scene.begin()

    scene.wait(lambda: scene.step() >= 2)
    judge.end()
    time.sleep(6)
    judge.start()

    scene.wait(lambda: scene.step() >= 4)
    scene.signal(scene.process("explorer 1"))

    scene.wait(lambda: scene.step() >= 6)
    stopped = scene.process("explorer 0")  # it holds explorers/0.lock
    scene.signal(stopped, signal.SIGSTOP)
    scene.keep_explorers()  # the killed one

    scene.wait(lambda: scene.step() >= 8 and newest(scene.out).name == "step-000008", 150)
    flip(newest(scene.out) / "model.safetensors")
    said = scene.output()
    scene.signal(scene.process("trainer"))
    end = scene.finish(200, resumes=True)
    send(stopped, signal.SIGCONT)
    assert end is not None, "the run does not end"
    assert end.code == 0, end.err
    assert scene.explorers_end() == [0, 0]
    return said + end.out + end.err
