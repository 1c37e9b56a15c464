"""Two runs in one directory, clocks that jump, and memory that runs out."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from faults.board import fault
from faults.scene import CannotRunError, Scene

TWICE = {"promise": "diagnosed", "code": 2, "deadline_s": 30}


def _second(scene: Scene, *argv: str) -> None:
    """Start a second command in the directory of a run, whose end counts; the first has to be done afterwards."""
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    scene.beside(*argv)


@fault(
    "a second `rollmill run` in the same directory",
    "inline/memory",
    "async/sqlite",
    names=("choose another",),
    **TWICE,
)
def _(scene: Scene) -> None:
    _second(scene, "run", "run.yaml", "--out", "out")


@fault("`rollmill resume` while the run goes on", "inline/sqlite", "ranks/memory", names=("is in use by",), **TWICE)
def _(scene: Scene) -> None:
    _second(scene, "resume", "out")


@fault("a second trainer", "processes/sqlite", names=("choose another",), **TWICE)
def _(scene: Scene) -> None:
    _second(scene, "run", "run.yaml", "--set", "mode=train", "--out", "out")


@fault("an explorer with another run file", "processes/memory", names=("differs from the run", "seed"), **TWICE)
def _(scene: Scene) -> None:
    _second(scene, "run", "run.yaml", "--set", "mode=explore", "--set", "seed=7", "--out", "out")


CLOCKED = ("inline/sqlite", "async/sqlite", "processes/sqlite", "inline/postgresql")


@fault("the trainer's clock jumps an hour ahead", *CLOCKED)
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=3, do="clock", seconds=3600)


@fault("the trainer's clock jumps an hour back", *CLOCKED)
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=3, do="clock", seconds=-3600)


@fault("an explorer's clock jumps a day back", "processes/sqlite")
def _(scene: Scene) -> None:
    scene.write(trainer_away_s=20)
    scene.trap("reward", nth=30, do="clock", seconds=-86400)


@fault("the trainer's control group has too little memory once", "inline/sqlite", "async/sqlite")
def _(scene: Scene) -> None:
    """The kernel kills it; the run goes on with more."""
    held = scene.trap("optimizer", nth=4, do="hold")
    scene.trap("optimizer", nth=4, do="memory", blocks=8)
    scene.begin()
    go = scene.held(held)
    group = _limited(scene, scene.process("trainer"), 256 << 20)
    scene.cleanup.callback(group.rmdir)
    go.touch()


def _limited(scene: Scene, pid: int, more: int) -> Path:
    """Move a process, and its parent that counts kills, into a control group that allows `more` bytes. Raises
    CannotRunError."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"rollmill-faults-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(more))
            for each in (psutil.Process(pid).ppid(), pid):
                (group / "cgroup.procs").write_text(str(each))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    raise CannotRunError("no control group of the kernel limits memory here")


@fault("a step runs out of the device's memory once", "inline/memory", "async/sqlite", names=("out of memory",))
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=4, do="raise", error="memory")


@fault("a step runs out of the host's memory once", "inline/memory", names=("memory",))
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=4, do="raise", error="host memory")
