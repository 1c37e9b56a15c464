"""Processes that are killed, stopped or interrupted."""

from __future__ import annotations

import signal
import time

from faults.board import fault
from faults.scene import GROUPS, SIZE, Scene

ALONE = ("inline/memory", "inline/sqlite", "inline/postgresql", "async/sqlite", "async/postgresql", "ranks/memory")
SPLIT = ("processes/memory", "processes/sqlite", "processes/postgresql")
EVERYWHERE = (*ALONE, *SPLIT)


@fault("the trainer is killed in an optimizer step", *EVERYWHERE)
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=4)


@fault("the trainer is killed while it writes a checkpoint", *EVERYWHERE)
def _(scene: Scene) -> None:
    scene.trap("open", "checkpoints/.writing-N-N/state.json", nth=2)


@fault("the trainer is killed as a checkpoint gets its name", "inline/memory", "async/sqlite", "ranks/memory")
def _(scene: Scene) -> None:
    scene.trap("rename", "checkpoints/step-N", nth=2)


@fault("the trainer is killed between metrics and checkpoint", "inline/memory", "inline/sqlite", "async/sqlite")
def _(scene: Scene) -> None:
    scene.trap("metrics", "after", nth=5)


@fault("the trainer is killed while old checkpoints are removed", "inline/memory")
def _(scene: Scene) -> None:
    scene.write(checkpoint={"keep_last": 1})
    scene.trap("rename", "checkpoints/.removing-N")


@fault("the trainer is killed while rewards are awaited", "inline/memory", "inline/sqlite", "async/sqlite")
def _(scene: Scene) -> None:
    scene.trap("reward", nth=60)


@fault("the trainer is killed in a commit of the buffer", "inline/sqlite", "inline/postgresql", "async/sqlite")
def _(scene: Scene) -> None:
    scene.trap("sql", "commit", nth=12)


@fault("the trainer is killed three times", "inline/sqlite", "async/sqlite", "processes/sqlite")
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=3)
    scene.trap("sql", "commit", nth=20)
    scene.trap("open", "checkpoints/.writing-N-N/trainer.pt", nth=2)


@fault("the trainer is killed before its first step", "inline/sqlite", "processes/sqlite")
def _(scene: Scene) -> None:
    scene.trap("open", "machine.json")
    scene.trap("optimizer")


@fault("the command is killed", "inline/sqlite", "processes/sqlite", "ranks/memory")
def _(scene: Scene) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 3)
    scene.signal(scene.pid)


def _interrupted(scene: Scene, number: signal.Signals) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 3)
    scene.signal(scene.pid, number)


@fault("Ctrl-C", "inline/memory", "async/sqlite", "processes/sqlite", "ranks/memory")
def _(scene: Scene) -> None:
    _interrupted(scene, signal.SIGINT)


@fault("SIGTERM", "inline/sqlite", "async/postgresql", "ranks/memory")
def _(scene: Scene) -> None:
    _interrupted(scene, signal.SIGTERM)


@fault("SIGHUP", "inline/memory", "processes/memory")
def _(scene: Scene) -> None:
    _interrupted(scene, signal.SIGHUP)


@fault("Ctrl-C twice", "inline/sqlite", "async/sqlite")
def _(scene: Scene) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 3)
    scene.signal(scene.pid, signal.SIGINT)
    time.sleep(0.02)
    scene.signal(scene.pid, signal.SIGINT)


@fault("the trainer is stopped for five seconds", "inline/sqlite", "async/sqlite", "processes/sqlite", "ranks/memory")
def _(scene: Scene) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    with scene.stopped(scene.process("trainer")):
        time.sleep(5)


@fault("an explorer is killed", *SPLIT)
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.signal(scene.process("explorer 0"))


@fault("both explorers are killed", "processes/sqlite")
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.signal(scene.explorer_pid(1))
    scene.signal(scene.explorer_pid(2))


@fault("an explorer is stopped for five seconds", "processes/sqlite")
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    with scene.stopped(scene.process("explorer 0")):
        time.sleep(5)


@fault("an explorer is stopped for good, with its lock", "processes/sqlite", deadline_s=150)
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    stopped = scene.process("explorer 0")
    scene.signal(stopped, signal.SIGSTOP)
    scene.cleanup.callback(scene.wake, stopped)
    scene.wait(lambda: scene.step() >= 5, 140)
    scene.wake(stopped)  # it has to notice that its work is no longer wanted


@fault("trainer and explorers are killed at once", "processes/sqlite", "processes/postgresql")
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 3)
    trainer = scene.process("trainer")
    scene.signal(scene.explorer_pid(1))
    scene.signal(scene.explorer_pid(2))
    scene.signal(trainer)


@fault("an explorer without a trainer", "processes/memory", promise="diagnosed", names=("the trainer",), deadline_s=60)
def _(scene: Scene) -> None:
    scene.write(trainer_away_s=4)
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 1)
    for pid in {scene.pid, scene.process("trainer")}:
        scene.signal(pid, signal.SIGSTOP)
    scene.watched = 1


@fault("a reward's process is killed", "inline/memory", "async/sqlite", "processes/memory")
def _(scene: Scene) -> None:
    scene.write(rewards=[{"name": "python", "function": "trap.py:noted", "processes": 1}])
    scene.trap("reward", nth=30)


@fault("a reward's process is stopped for good", "inline/memory", level="complete")
def _(scene: Scene) -> None:
    scene.write(rewards=[{"name": "python", "function": "trap.py:noted", "processes": 1, "time_limit_s": 3}])
    scene.trap("reward", nth=30, do="stop")


@fault("another rank is killed in a step", "ranks/memory", names=("rank 1",))
def _(scene: Scene) -> None:
    held = scene.trap("optimizer", nth=3, do="hold")
    scene.begin()
    go = scene.held(held)
    scene.signal(scene.process("trainer rank 1"))
    go.touch()


@fault("another rank is killed while a checkpoint is written", "ranks/memory", names=("rank 1",))
def _(scene: Scene) -> None:
    held = scene.trap("open", "checkpoints/.writing-N-N/trainer.pt", nth=1, do="hold")
    scene.begin()
    go = scene.held(held)
    scene.signal(scene.process("trainer rank 1"))
    go.touch()


@fault("another rank is stopped for good", "ranks/memory", names=("rank 1", "rank_deadline_s"), deadline_s=300)
def _(scene: Scene) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.signal(scene.process("trainer rank 1"), signal.SIGSTOP)


@fault("another rank is stopped for five seconds", "ranks/memory")
def _(scene: Scene) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    with scene.stopped(scene.process("trainer rank 1")):
        time.sleep(5)


# -- the command, which supervises the process that trains ---------------------------------------------------------


@fault("the command is stopped for five seconds", "inline/sqlite", "ranks/memory")
def _(scene: Scene) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    with scene.stopped(scene.pid):
        time.sleep(5)


@fault("the trainer is killed while the command is stopped", "inline/sqlite", "async/sqlite", "processes/sqlite")
def _(scene: Scene) -> None:
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    with scene.stopped(scene.pid):
        scene.signal(scene.process("trainer"))
        time.sleep(2)


@fault("another command takes a run while its own is stopped", "inline/sqlite", deadline_s=240)
def _(scene: Scene) -> None:
    """The trainer is killed meanwhile. The first command ends, and says who has the run; the second one finishes it."""
    scene.pace(1.5)  # the second one has the run for longer than the first one waits
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    with scene.stopped(scene.pid):
        killed = scene.process("trainer")
        scene.signal(killed)
        scene.beside("resume", "out")
        scene.wait(lambda: scene.process("trainer") != killed)
    scene.first_ends()
    assert scene.first is not None, "the first command does not end"
    assert (scene.first.code, "it does not start again: out is in use by process" in scene.first.err) == (1, True)


@fault(
    "the trainer is stopped for good",
    *("inline/sqlite", "async/sqlite", "processes/sqlite", "ranks/memory"),
    deadline_s=240,
)
def _(scene: Scene) -> None:
    scene.write(supervise={"backoff_s": 0.1, "stall_s": 15.0})
    scene.pace(0.02)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.signal(scene.process("trainer"), signal.SIGSTOP)


@fault("the trainer is killed in an evaluation", "inline/memory", "processes/sqlite", "ranks/memory")
def _(scene: Scene) -> None:
    """The one after step 3."""
    if scene.mode.explorers:  # whose rewards these are
        scene.trap("metrics", "before", nth=2, place="orchestrator/monitor.py:evaluation")
    else:
        scene.trap("reward", nth=28 + 3 * GROUPS * SIZE + 10)


@fault("the trainer is killed as it records smaller settings", "inline/sqlite")
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=4, do="raise", error="memory")
    scene.trap("open", "events.jsonl")
