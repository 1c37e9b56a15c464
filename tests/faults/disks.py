"""Full and read-only disks, missing permissions, limits of the system, and files that are taken away."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from faults.board import fault
from faults.scene import CannotRunError, Scene, fill

FULL = ("cannot write the checkpoint", "No space left", "rollmill resume")


@fault(
    "the disk is full at a checkpoint", "inline/memory", "async/sqlite", "ranks/memory", "processes/memory", names=FULL
)
def _(scene: Scene) -> None:
    disk = scene.disk("24m")
    held = scene.trap("mkdir", "checkpoints/.writing-N-N", nth=2, do="hold")
    scene.begin()
    go = scene.held(held)
    filler = fill(disk)
    scene.mend = lambda: filler.unlink(missing_ok=True)
    go.touch()


@fault("the disk is full at a line of metrics", "inline/memory", names=("cannot write", "No space left"))
def _(scene: Scene) -> None:
    disk = scene.disk("24m")
    scene.write(monitor={"report": False})
    held = scene.trap("metrics", "before", nth=5, do="hold")
    scene.begin()
    go = scene.held(held)
    filler = fill(disk)
    scene.mend = lambda: filler.unlink(missing_ok=True)
    go.touch()


@fault("the disk is full at a write of the buffer", "inline/sqlite", "async/sqlite", names=("full", "ree some space"))
def _(scene: Scene) -> None:
    disk = scene.disk("48m")
    held = scene.trap("sql", "insert into rollmill_experiences", nth=3, do="hold")
    scene.begin()
    go = scene.held(held)
    filler = fill(disk)
    scene.mend = lambda: filler.unlink(missing_ok=True)
    go.touch()


@fault("no more files fit on the disk", "inline/memory", names=("No space left",))
def _(scene: Scene) -> None:
    disk = scene.disk("24m", ",nr_inodes=400")
    held = scene.trap("mkdir", "checkpoints/.writing-N-N", nth=2, do="hold")
    scene.begin()
    go = scene.held(held)
    (disk / "many").mkdir()
    for number in range(400):
        try:
            (disk / f"many/{number}").touch()
        except OSError:
            break
    scene.mend = lambda: shutil.rmtree(disk / "many", ignore_errors=True)
    go.touch()


def _mounted(disk: Path, how: str) -> None:
    if subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], capture_output=True).returncode:
        # files that are open for writing keep a disk from it
        raise CannotRunError("this disk cannot be made read-only while it is in use")


@fault("no file may be longer than a few bytes", "inline/memory", names=("File too large",))
def _(scene: Scene) -> None:
    held = scene.trap("mkdir", "checkpoints/.writing-N-N", nth=2, do="hold")
    scene.begin()
    go = scene.held(held)
    for pid in {scene.pid, scene.process("trainer")}:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    go.touch()


@fault("no more files can be opened", "inline/memory", names=("Too many open files",))
def _(scene: Scene) -> None:
    held = scene.trap("mkdir", "checkpoints/.writing-N-N", nth=2, do="hold")
    scene.begin()
    go = scene.held(held)
    trainer = scene.process("trainer")
    used = max(map(int, os.listdir(f"/proc/{trainer}/fd")))
    for pid in {scene.pid, trainer}:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, used))
    go.touch()


@fault("a file takes the place of the folder of checkpoints", "inline/memory", names=("cannot write the checkpoint",))
def _(scene: Scene) -> None:
    held = scene.trap("metrics", "after", nth=4, do="hold")
    scene.begin()
    go = scene.held(held)
    folder = scene.out / "checkpoints"
    aside = folder.rename(scene.folder / "aside")
    folder.write_text("a file")

    def mend() -> None:
        if folder.is_file():
            folder.unlink()
            aside.rename(folder)

    scene.mend = mend
    go.touch()


GONE = {"promise": "diagnosed", "deadline_s": 60}


@fault("the run directory is moved away", "inline/memory", "async/sqlite", names=("was removed or replaced",), **GONE)
def _(scene: Scene) -> None:
    held = scene.trap("metrics", "before", nth=3, do="hold")
    scene.begin()
    go = scene.held(held)
    scene.out.rename(scene.folder / "elsewhere")
    go.touch()


@fault("metrics.jsonl is removed", "inline/memory", names=("metrics.jsonl was removed",), **GONE)
def _(scene: Scene) -> None:
    held = scene.trap("metrics", "before", nth=3, do="hold")
    scene.begin()
    go = scene.held(held)
    (scene.out / "metrics.jsonl").unlink()
    go.touch()


@fault("buffer.sqlite is removed", "inline/sqlite", "async/sqlite", names=("buffer.sqlite was removed",), **GONE)
def _(scene: Scene) -> None:
    held = scene.trap("sql", "insert into rollmill_experiences", nth=3, do="hold")
    scene.begin()
    go = scene.held(held)
    (scene.out / "buffer.sqlite").unlink()
    go.touch()


@fault("the folder of weights is removed", "processes/memory")
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    shutil.rmtree(scene.out / "weights")


@fault("trainer.json is removed", "processes/memory", deadline_s=45)
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    (scene.out / "trainer.json").unlink()


@fault("the folder of heartbeats is removed", "inline/memory", "processes/memory")
def _(scene: Scene) -> None:
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()
    (scene.out / "processes").rename(scene.folder / "away")


@fault("the folder of checkpoints is removed", "inline/memory")
def _(scene: Scene) -> None:
    held = scene.trap("metrics", "after", nth=5, do="hold")
    scene.begin()
    go = scene.held(held)
    shutil.rmtree(scene.out / "checkpoints")
    go.touch()


@fault("the disk becomes read-only at a checkpoint", "inline/memory", names=("Read-only file system",))
def _(scene: Scene) -> None:
    disk = scene.disk("24m")
    held = scene.trap("mkdir", "checkpoints/.writing-N-N", nth=2, do="hold")
    scene.begin()
    go = scene.held(held)
    # a read-only layer over the folder alone: the whole disk has files that are open
    folder = disk / "out/checkpoints"
    bind = ["mount", "--bind", str(folder), str(folder)]
    if subprocess.run(bind, capture_output=True).returncode:
        raise CannotRunError("mounting a read-only folder needs root")
    scene.cleanup.callback(subprocess.run, ["umount", "-l", str(folder)], capture_output=True)
    _mounted(folder, "ro,bind")
    scene.mend = lambda: _mounted(folder, "rw,bind")
    go.touch()


@fault("the disk becomes read-only before a restart", "inline/memory", names=("Read-only file system",))
def _(scene: Scene) -> None:
    """Neither lock nor event can be written, so the command ends, and says why."""
    disk = scene.disk("24m")
    held = scene.trap("optimizer", nth=4, do="hold")
    scene.begin()
    scene.held(held)
    folder = disk / "out"
    if subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True).returncode:
        raise CannotRunError("mounting a read-only folder needs root")
    scene.cleanup.callback(subprocess.run, ["umount", "-l", str(folder)], capture_output=True)
    _mounted(folder, "ro,bind")
    scene.mend = lambda: _mounted(folder, "rw,bind")
    scene.signal(scene.process("trainer"))
