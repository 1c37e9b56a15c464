"""Actors of Ray that are killed or stopped, and Ray itself."""

from __future__ import annotations

import importlib.util
import signal
import time

import psutil

from faults.board import fault
from faults.scene import CannotRunError, Scene

ON_RAY = ("ray/sqlite",)
DIED = ("Ray has died", "rollmill resume")


def _working(scene: Scene, *waits_for: str) -> None:
    if importlib.util.find_spec("ray") is None:
        raise CannotRunError("Ray is not installed: pip install 'rollmill[ray]'")
    scene.pace(0.05)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2 and all(scene.process(name) for name in waits_for), 150)


def _of_ray(scene: Scene, name: str) -> int:
    for child in psutil.Process(scene.pid).children(recursive=True):
        if child.name() == name:
            return child.pid
    raise AssertionError(f"no process {name}")


def _killed_in_a_long_step(scene: Scene, service: str) -> None:
    """Kill a service of Ray in a step that does not end before its death is noticed, which takes seconds."""
    held = scene.trap("optimizer", nth=4, do="hold")
    _working(scene)
    scene.held(held)
    scene.signal(_of_ray(scene, service))


@fault("an explorer is killed", *ON_RAY, deadline_s=180)
def _(scene: Scene) -> None:
    _working(scene, "explorer 0")
    scene.signal(scene.process("explorer 0"))


@fault("an explorer is stopped for good", *ON_RAY, deadline_s=180)
def _(scene: Scene) -> None:
    _working(scene, "explorer 1")
    scene.signal(scene.process("explorer 1"), signal.SIGSTOP)


@fault("the trainer is killed in an optimizer step", *ON_RAY, "ray/postgresql", deadline_s=180)
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=4)
    _working(scene)


@fault("the trainer is killed while it writes a checkpoint", *ON_RAY, deadline_s=180)
def _(scene: Scene) -> None:
    scene.trap("open", "checkpoints/.writing-N-N/state.json", nth=2)
    _working(scene)


@fault("the trainer is stopped for good", *ON_RAY, deadline_s=180)
def _(scene: Scene) -> None:
    _working(scene)
    scene.signal(scene.process("trainer"), signal.SIGSTOP)


@fault("another rank is killed", *ON_RAY, deadline_s=240, level="complete")
def _(scene: Scene) -> None:
    scene.write(trainer={"lr": 1e-3, "ranks": 2})
    _working(scene, "trainer rank 1")
    scene.signal(scene.process("trainer rank 1"))


@fault("the raylet is killed", *ON_RAY, names=DIED, deadline_s=240)
def _(scene: Scene) -> None:
    _working(scene)
    scene.signal(_of_ray(scene, "raylet"))


@fault("Ray's gcs_server is killed", *ON_RAY, names=DIED, deadline_s=300)
def _(scene: Scene) -> None:
    _killed_in_a_long_step(scene, "gcs_server")


@fault("Ray's gcs_server is killed in the last steps", *ON_RAY, deadline_s=300, max_tries=1)
def _(scene: Scene) -> None:
    _working(scene)
    scene.wait(lambda: scene.step() >= 4, 60)
    scene.signal(_of_ray(scene, "gcs_server"))


@fault("the raylet is killed while a step goes on for long", *ON_RAY, names=DIED, deadline_s=300)
def _(scene: Scene) -> None:
    _killed_in_a_long_step(scene, "raylet")


@fault("Ray's gcs_server is killed after the last step", *ON_RAY, deadline_s=120, max_tries=1)
def _(scene: Scene) -> None:
    held = scene.trap("rename", "summary.json", do="hold")
    _working(scene)
    scene.held(held)
    scene.signal(_of_ray(scene, "gcs_server"))


@fault("the command is killed", *ON_RAY, deadline_s=180)
def _(scene: Scene) -> None:
    _working(scene)
    scene.signal(scene.pid)


@fault("Ctrl-C", *ON_RAY, deadline_s=180)
def _(scene: Scene) -> None:
    _working(scene)
    scene.signal(scene.pid, signal.SIGINT)


@fault("an explorer is stopped for three seconds", *ON_RAY, deadline_s=180)
def _(scene: Scene) -> None:
    _working(scene, "explorer 0")
    scene.hit()
    with scene.stopped(scene.process("explorer 0")):
        time.sleep(3)
