"""Files that are damaged between a kill and the next start."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults.board import fault
from faults.scene import Scene


def newest(run: Path) -> Path:
    """The newest checkpoint."""
    return max((run / "checkpoints").glob("step-*"))


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << random.Random(len(data)).randrange(8)
    path.write_bytes(data)


def half_zero(path: Path) -> None:
    """Zero the second half, as a lost write does."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def cut(path: Path) -> None:
    """Leave the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    """Leave nothing."""
    path.write_bytes(b"")


SPOILS = {
    "has a flipped bit": flip,
    "is half zeroed": half_zero,
    "is cut in half": cut,
    "is empty": empty,
    "is missing": os.unlink,
}


def _put(name: str, how: str, *places: str) -> None:
    @fault(f"{name} of the newest checkpoint {how}", *places)
    def _(scene: Scene) -> None:
        scene.kill_then_spoil(lambda run: SPOILS[how](newest(run) / name))


for _name, _how in (
    ("model.safetensors", "has a flipped bit"),
    ("trainer.pt", "has a flipped bit"),
    ("state.json", "has a flipped bit"),
    ("model.safetensors", "is half zeroed"),
    ("trainer.pt", "is cut in half"),
    ("state.json", "is empty"),
    ("tokenizer.json", "is missing"),
    ("config.json", "is missing"),
):
    _put(_name, _how, "inline/sqlite")
_put("model.safetensors", "has a flipped bit", "async/sqlite", "processes/sqlite", "ranks/memory")


@fault("the newest checkpoint is empty", "inline/memory")
def _(scene: Scene) -> None:
    def spoil(run: Path) -> None:
        folder = newest(run)
        shutil.rmtree(folder)
        folder.mkdir()

    scene.kill_then_spoil(spoil)


@fault("every checkpoint is damaged", "inline/memory", promise="diagnosed", names=("checkpoint", "model.safetensors"))
def _(scene: Scene) -> None:
    scene.kill_then_spoil(
        lambda run: [flip(each / "model.safetensors") for each in (run / "checkpoints").glob("step-*")]
    )


@fault("machine.json is empty", "inline/memory")
def _(scene: Scene) -> None:
    scene.kill_then_spoil(lambda run: empty(run / "machine.json"))


@fault("config.yaml is cut in half", "inline/memory", promise="diagnosed", code=2, names=("config.yaml",))
def _(scene: Scene) -> None:
    scene.kill_then_spoil(lambda run: cut(run / "config.yaml"))


@fault(
    "a line in the middle of metrics.jsonl is damaged", "inline/memory", promise="diagnosed", names=("metrics.jsonl:2",)
)
def _(scene: Scene) -> None:
    def spoil(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
        lines[1] = lines[1][:30]
        (run / "metrics.jsonl").write_bytes(b"\n".join(lines))

    scene.kill_then_spoil(spoil)


@fault("buffer.sqlite is overwritten", "inline/sqlite", promise="diagnosed", names=("buffer.sqlite", "damaged"))
def _(scene: Scene) -> None:
    def spoil(run: Path) -> None:
        for path in run.glob("buffer.sqlite-*"):
            path.unlink()
        (run / "buffer.sqlite").write_bytes(b"no database " * 1000)

    scene.kill_then_spoil(spoil)


@fault("the last line of metrics.jsonl is torn", "inline/memory")
def _(scene: Scene) -> None:
    def spoil(run: Path) -> None:
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 6, "loss": 0.1')

    scene.kill_then_spoil(spoil)


@fault("a killed process has left temporary files", "inline/memory")
def _(scene: Scene) -> None:
    def spoil(run: Path) -> None:
        (run / "checkpoints/.writing-000004-99").mkdir()
        (run / "checkpoints/.writing-000004-99/model.safetensors").write_bytes(b"x" * 1000)
        (run / ".machine.json.99.tmp").write_bytes(b"{")

    scene.kill_then_spoil(spoil)


@fault("a line of events.jsonl is damaged, and the last one torn", "inline/memory")
def _(scene: Scene) -> None:
    def spoil(run: Path) -> None:
        (run / "events.jsonl").write_bytes(b'{"time": 17\nno event\n{"time": 18.0, "eve')

    scene.kill_then_spoil(spoil)
    scene.trap("optimizer", nth=7)  # a restart is recorded after them


def _between_restarts(scene: Scene, spoil: Callable[[Path], object]) -> None:
    """Spoil the run directory, and kill the process that trains; the command starts it again by itself."""
    held = scene.trap("optimizer", nth=6, do="hold")  # there are two checkpoints
    scene.begin()
    scene.held(held)
    spoil(scene.out)
    scene.signal(scene.process("trainer"))


@fault("machine.json is damaged between two restarts", "inline/sqlite", "processes/sqlite")
def _(scene: Scene) -> None:
    _between_restarts(scene, lambda run: cut(run / "machine.json"))


@fault("the newest checkpoint is damaged between two restarts", "inline/sqlite", "ranks/memory")
def _(scene: Scene) -> None:
    _between_restarts(scene, lambda run: flip(newest(run) / "trainer.pt"))


@fault("config.yaml is cut between two restarts", "inline/memory", promise="diagnosed", code=2, names=("config.yaml",))
def _(scene: Scene) -> None:
    _between_restarts(scene, lambda run: cut(run / "config.yaml"))


@fault("events.jsonl becomes a folder between two restarts", "inline/memory")
def _(scene: Scene) -> None:
    """A restart that cannot be recorded is made nevertheless."""
    _between_restarts(scene, lambda run: (run / "events.jsonl").mkdir())
