"""vLLM's processes that are killed or stopped."""

from __future__ import annotations

import signal
import time

import psutil

from faults.board import fault
from faults.scene import Scene

ON_VLLM = ("vllm/memory",)


def _working(scene: Scene) -> None:
    scene.begin()
    scene.wait(lambda: scene.step() >= 2, 500)


def vllm_process(owner: int, of: str) -> int:
    """vLLM's process `worker`, which a process of rollmill has started, or its child `EngineCore`."""
    for process in psutil.Process(owner).children(recursive=True):
        if "rollmill.engines.vllm.worker" in process.cmdline()[:5]:
            children = process.children(recursive=True)
            return process.pid if of == "worker" else children[0].pid
    raise AssertionError("no process of vLLM")


@fault("vLLM's process is killed", *ON_VLLM, deadline_s=600)
def _(scene: Scene) -> None:
    _working(scene)
    scene.signal(vllm_process(scene.pid, "worker"))


@fault("vLLM's EngineCore is killed", *ON_VLLM, deadline_s=600)
def _(scene: Scene) -> None:
    _working(scene)
    scene.signal(vllm_process(scene.pid, "EngineCore"))


@fault("vLLM's process is stopped for five seconds", *ON_VLLM, deadline_s=600)
def _(scene: Scene) -> None:
    _working(scene)
    scene.hit()
    with scene.stopped(vllm_process(scene.pid, "worker")):
        time.sleep(5)


@fault("vLLM's process is stopped for good", *ON_VLLM, deadline_s=900)
def _(scene: Scene) -> None:
    _working(scene)
    scene.signal(vllm_process(scene.pid, "worker"), signal.SIGSTOP)


@fault("the trainer is killed in an optimizer step", *ON_VLLM, deadline_s=900)
def _(scene: Scene) -> None:
    scene.trap("optimizer", nth=4)
