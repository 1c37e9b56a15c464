"""Rewards, environments, judges and operators that hang, fail, lie or end the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from faults.board import fault
from faults.scene import BASE, Scene

SERVER = Path(__file__).with_name("judge_server.py")
ACTS = {
    "workflow": {"name": "environment", "turns": 1},
    "environment": {"name": "Moody", "processes": 1, "time_limit_s": 2},
    "rewards": None,
    "rollout": {"attempts": 2},
}
WHERE = ("inline/memory", "async/sqlite", "processes/memory")


@fault("an environment hangs once", *WHERE, level="complete")
def _(scene: Scene) -> None:
    scene.write(**ACTS)
    scene.trap("environment", nth=30, do="sleep", seconds=1000)


@fault("an environment ends its process once", *WHERE, level="complete")
def _(scene: Scene) -> None:
    scene.write(**ACTS)
    scene.trap("environment", nth=30, do="exit")


@fault("an environment's process is stopped for good", "inline/memory", level="complete")
def _(scene: Scene) -> None:
    scene.write(**ACTS)
    scene.trap("environment", nth=30, do="stop")


@fault(
    "every step of an environment hangs",
    "inline/memory",
    promise="diagnosed",
    names=("`Stuck`", "environment.time_limit_s"),
    deadline_s=60,
)
def _(scene: Scene) -> None:
    scene.write(**ACTS | {"environment": {"name": "Stuck", "processes": 1, "time_limit_s": 1}})


@fault("a reward hangs once", "inline/memory", "async/sqlite", "processes/memory", level="complete")
def _(scene: Scene) -> None:
    """Its process is killed at the time limit, and the completion earns the timeout_reward."""
    scene.write(rewards=[{"name": "python", "function": "trap.py:noted", "processes": 1, "time_limit_s": 3}])
    scene.trap("reward", nth=30, do="sleep", seconds=1000)


@fault(
    "a reward hangs always",
    "inline/memory",
    promise="diagnosed",
    names=("`stuck` did not return within 0.5 s",),
    deadline_s=90,
)
def _(scene: Scene) -> None:
    scene.write(
        rewards=[{"name": "python", "function": "stuck", "run_in": "thread", "time_limit_s": 0.5}], evaluation=None
    )


@fault(
    "an async reward blocks its event loop",
    "inline/memory",
    promise="diagnosed",
    names=("`blocking`", "blocks the event loop", "trap.py:"),
    deadline_s=90,
)
def _(scene: Scene) -> None:
    scene.write(rewards=[{"name": "python", "function": "blocking", "time_limit_s": 0.5}], evaluation=None)


@fault("a reward raises", *WHERE, promise="diagnosed", names=("no such answer",), deadline_s=60)
def _(scene: Scene) -> None:
    scene.write(rewards=[{"name": "python", "function": "raising", "run_in": "thread"}])


@fault(
    "a reward ends the process",
    "inline/memory",
    promise="diagnosed",
    names=("`exiting`", "SystemExit: enough"),
    deadline_s=60,
)
def _(scene: Scene) -> None:
    scene.write(rewards=[{"name": "python", "function": "exiting", "run_in": "thread"}])


@fault("the loss is not finite", "inline/memory", "ranks/memory", promise="diagnosed", names=("finite",), deadline_s=60)
def _(scene: Scene) -> None:
    scene.write(trainer=BASE["trainer"] | scene.mode.changes.get("trainer", {}) | {"lr": 1e38})


class Judge:
    """A judge's server, in a process of its own, on one port."""

    def __init__(self, scene: Scene) -> None:
        self.port = 0
        self.start()
        keys = {
            "endpoint": f"http://127.0.0.1:{self.port}/v1",
            "model": "m",
            "try_s": 3,
            "deadline_s": 30,
            "away_s": 12,
        }
        scene.write(rewards=[{"name": "judge", **keys}], evaluation=None)
        scene.cleanup.callback(self.end)

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, str(SERVER), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


def _judged(scene: Scene) -> Judge:
    """Start a run with a judge, and wait until it is at work."""
    judge = Judge(scene)
    scene.begin()
    scene.wait(lambda: scene.step() >= 1)
    scene.hit()
    return judge


@fault("the judge's server is restarted after five seconds", *WHERE)
def _(scene: Scene) -> None:
    judge = _judged(scene)
    judge.end()
    time.sleep(5)
    judge.start()


@fault("the judge's server is stopped for eight seconds", "inline/memory", "async/sqlite")
def _(scene: Scene) -> None:
    judge = _judged(scene)
    judge.process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    judge.process.send_signal(signal.SIGCONT)


@fault(
    "the judge's server stays away",
    "inline/memory",
    promise="diagnosed",
    names=("judge", "127.0.0.1"),
    deadline_s=200,
)
def _(scene: Scene) -> None:
    scene.changes["supervise"] = {"restarts": 0}  # each try would wait as long
    _judged(scene).end()
