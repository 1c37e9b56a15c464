"""Plugin of the runs on the fault board: it sets off the faults that `plan.json` beside it lists, each once.

It is copied into the folder of a run and named under `plugins`, so that it is imported by every process of the run. An
audit hook sees each file that is opened for writing, renamed, removed or made in the run directory; fsync, statements
of a database, lines of metrics, optimizer steps, rewards and steps of an environment are noted by hooks of their own.
With `record` in the plan every operation is written to `operations.jsonl`, otherwise nothing but a fault happens.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import rollmill

HERE = Path(__file__).resolve().parent
_OUT = re.compile(rf"{re.escape(str(HERE))}/(?:disk/)?out/(.*)")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATHS = {"open": "open", "os.rename": "rename", "os.remove": "remove", "os.mkdir": "mkdir", "os.rmdir": "rmdir"}
_inside = threading.local()
_clock = time.time


class Plan:
    """The faults that are to come, and how often each operation has happened in this process."""

    def __init__(self) -> None:
        path = HERE / "plan.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        self.traps: list[dict[str, Any]] = found.get("traps", [])
        self.record = bool(found.get("record"))
        self.pace_s = float(found.get("pace_s", 0.0))
        self.counts: Counter[Any] = Counter()

    def happened(self, kind: str, path: str = "") -> None:
        """Note an operation, and set off the faults that wait for it."""
        if getattr(_inside, "busy", False) or not (self.traps or self.record):
            return
        _inside.busy = True
        try:
            name = re.sub(r"\d+", "N", re.sub(r"@.+?\.tmp", "@HOST.tmp", path))
            if self.record:
                line = json.dumps({"kind": kind, "path": name, "place": place(), "pid": os.getpid()}) + "\n"
                with (HERE / "operations.jsonl").open("a") as file:
                    file.write(line)
            for trap in self.traps:
                if trap["kind"] == kind and trap.get("path", name) == name and trap.get("place") in (None, place()):
                    self.counts[trap["id"]] += 1
                    if self.counts[trap["id"]] == trap.get("nth", 1) and _first(trap["id"]):
                        spring(trap)
        finally:
            _inside.busy = False


def place() -> str:
    """FILE:FUNCTION of the innermost code of rollmill that is no file helper."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/rollmill/" in name and not name.endswith(("/rollmill/files.py", "/rollmill/registry.py")):
            return f"{name.rpartition('/rollmill/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _first(name: str) -> bool:
    """Whether this process is the one that sets off a fault, which happens once in all tries of a run."""
    try:
        os.close(os.open(HERE / f"fired-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def spring(trap: dict[str, Any]) -> None:
    """Do what a trap does."""
    do, seconds = trap.get("do", "kill"), float(trap.get("seconds", 0))
    if do == "kill":
        _kill_after(seconds)
    elif do == "stop":
        os.kill(os.getpid(), 19)
    elif do == "sleep":
        time.sleep(seconds)
    elif do == "hold":  # until the board has done its part
        ends = time.monotonic() + 60
        while not (HERE / f"go-{trap['id']}").exists() and time.monotonic() < ends:
            time.sleep(0.005)
    elif do == "exit":
        os._exit(int(trap.get("code", 3)))
    elif do == "clock":
        time.time = lambda: _clock() + seconds
    elif do == "memory":  # more than its control group may have
        kept = [bytearray(b"x" * (64 << 20)) for _ in range(int(trap["blocks"]))]
        del kept
    elif do == "raise":
        import torch

        if trap["error"] == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        raise MemoryError


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


def _kill_after(seconds: float) -> None:
    """SIGKILL for this process, now or by a timer of the kernel: also in the middle of code that never returns here."""
    if not seconds:
        os.kill(os.getpid(), 9)
    libc, timer, whole = ctypes.CDLL(None), ctypes.c_void_p(), int(seconds)
    event = _SigEvent(None, 9, 0, b"")
    assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
    times = (ctypes.c_long * 4)(0, 0, whole, int((seconds - whole) * 1e9))
    assert libc.timer_settime(timer, 0, times, None) == 0


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    kind = _PATHS.get(event)
    if kind is None or getattr(_inside, "busy", False):
        return
    if kind == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    path = arguments[1] if kind == "rename" else arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):
        return
    text = os.fsdecode(path)
    folder = arguments[-1] if kind in ("remove", "rmdir") else -1  # rmtree gives names in an open folder
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    if found := _OUT.match(os.path.abspath(text)):
        _plan().happened(kind, found[1])


def _plan() -> Plan:
    return sys._faults  # type: ignore[attr-defined,no-any-return]


def _install() -> None:
    """Once in a process: a child that was forked has its parent's hooks."""
    sys.addaudithook(_audit)
    if any("grader_worker" in word for word in sys.orig_argv):  # of rewards or environments: starts quickly
        return
    import sqlalchemy
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from rollmill.trackers.metrics_log import MetricsLog

    fsync, append = os.fsync, MetricsLog.append

    def noted_fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if found := _OUT.match(os.readlink(f"/proc/self/fd/{number}")):
            _plan().happened("fsync", found[1])
        fsync(file)

    def noted_append(self: MetricsLog, metrics: Any) -> None:
        _plan().happened("metrics", "before")
        append(self, metrics)
        _plan().happened("metrics", "after")

    def before_statement(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        _plan().happened("sql", " ".join(re.findall(r"\w+", statement)[:3]).lower())

    def before_commit(connection: Any) -> None:
        _plan().happened("sql", "commit")

    os.fsync = noted_fsync
    MetricsLog.append = noted_append  # type: ignore[method-assign]
    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", before_statement)
    sqlalchemy.event.listen(sqlalchemy.Engine, "commit", before_commit)
    register_optimizer_step_pre_hook(lambda *_: _plan().happened("optimizer"))


if not hasattr(sys, "_faults"):
    sys._faults = Plan()  # type: ignore[attr-defined]
    _install()


@rollmill.reward
def noted(task: Any, completion: Any) -> float:
    """A reward that takes a moment, so that a fault finds the run at work."""
    _plan().happened("reward")
    time.sleep(_plan().pace_s)
    return float("1" in completion.text)


@rollmill.environment
class Moody:
    """One action, rewarded where it contains a 1."""

    def reset(self, task: Any, seed: int) -> str:
        """Begin with the task's prompt."""
        return str(task.prompt)

    def step(self, action: str) -> Any:
        """End."""
        from rollmill.rollout.environments import StepResult

        _plan().happened("environment")
        return StepResult("", float("1" in action), done=True)


@rollmill.environment
class Stuck(Moody):
    """A step that never ends."""

    def reset(self, task: Any, seed: int) -> str:
        """Begin with the task's prompt."""
        return str(task.prompt)

    def step(self, action: str) -> Any:
        """Wait."""
        time.sleep(1000)


@rollmill.reward
def stuck(task: Any, completion: Any) -> float:
    """A reward that takes longer than it may."""
    time.sleep(2)
    return 0.0


@rollmill.reward
async def blocking(task: Any, completion: Any) -> float:
    """A reward that waits where it should await."""
    time.sleep(1000)
    return 0.0


@rollmill.reward
def raising(task: Any, completion: Any) -> float:
    """A reward with a bug."""
    raise ValueError("no such answer")


@rollmill.reward
def exiting(task: Any, completion: Any) -> float:
    """A reward that ends the process."""
    sys.exit("enough")
