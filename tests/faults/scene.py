"""One run on the fault board: its folder, its processes, and what is done to them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.forks import Ended, Forks, ended, forks, send
from support.postgres import Postgres, missing
from support.tiny import tiny_run
from support.vllm_service import PYTHON

from rollmill.trackers.heartbeat import read_heartbeats

STEPS, GROUPS, SIZE = 6, 4, 4
"""Training steps of a run, tasks of a step, completions of a task."""
BASE: dict[str, Any] = {
    "stages": None,
    "steps": STEPS,
    "algorithm": {"name": "grpo"},
    "trainer": {"lr": 1e-3},
    "plugins": ["trap.py"],
    "rewards": [{"name": "python", "function": "noted", "run_in": "thread"}],
    "checkpoint": {"every": 2},
    "evaluation": {"every": 3},
    "supervise": {"backoff_s": 0.1},
}
TRAP = Path(__file__).with_name("trap.py")


class CannotRunError(Exception):
    """This machine lacks what a fault needs; the message names it."""


@dataclass(frozen=True)
class Mode:
    """Where rollouts and training happen. `promise` is what a recovered run is compared by."""

    name: str
    promise: str
    changes: dict[str, Any] = field(default_factory=dict)
    explorers: int = 0  #: commands besides the trainer's


MODES = {
    mode.name: mode
    for mode in (
        Mode("inline", "bit-equal"),
        Mode("async", "complete", {"max_staleness": 2, "evaluation": None}),
        Mode("processes", "same rollouts", {"trainer_away_s": 90}, explorers=2),
        Mode("ranks", "bit-equal", {"trainer": {"lr": 1e-3, "ranks": 2, "rank_deadline_s": 15}}),
        Mode("ray", "same rollouts", {"placement": {"name": "ray", "explorers": 2, "health_s": 8.0}}),
        Mode(
            "vllm",
            "same rollouts",
            {
                "engine": {"name": "vllm", "python": str(PYTHON), "cache_gb": 0.25, "deadline_s": 300},
                "model": {"new": {"hidden_size": 64, "heads": 2, "kv_heads": 1}},
            },
        ),
    )
}


class Services:
    """What scenes share: processes that fork commands, a PostgreSQL, and undisturbed runs to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wholes: dict[str, Path] = {}
        self._stack = ExitStack()
        self._forks: list[Forks] = []
        self._postgres: Postgres | None = None

    def servers(self, count: int) -> list[Forks]:
        """The first `count` servers, each of which runs one command at a time."""
        while len(self._forks) < count:
            self._forks.append(self._stack.enter_context(forks()))
        return self._forks[:count]

    def drop(self, server: Forks) -> None:
        """Forget a server whose processes cannot be ended."""
        self._forks.remove(server)

    @property
    def postgres(self) -> Postgres:
        """A running server. Raises CannotRunError."""
        if (reason := missing()) is not None:
            raise CannotRunError(reason)
        if self._postgres is None:
            self._postgres = Postgres()
            self._stack.callback(self._postgres.remove)
            self._postgres.start()
        return self._postgres

    def close(self) -> None:
        """End everything."""
        self._stack.close()


class Scene:
    """A run in a folder of its own, `out`, with the run file `run.yaml` and the traps of `plan.json`."""

    def __init__(self, services: Services, folder: Path, mode: Mode, store: str) -> None:
        self.services, self.folder, self.mode, self.store = services, folder, mode, store
        self.out = folder / "out"
        self.changes: dict[str, Any] = {}
        self.plan: dict[str, Any] = {"traps": []}
        self.tries = 0
        self.failures: list[Ended] = []  #: of tries that did not end with 0
        self.mend: Callable[[], None] = lambda: None
        """What a user does before the run is resumed."""
        self.hit_at: float | None = None
        self.hit_step = 0
        self.recovered_at: float | None = None
        self.watched = 0  #: the command whose end counts: the trainer's, or an explorer's, from 1
        self.first: Ended | None = None  #: how the first command ended, where another one beside it is watched
        self.cleanup = ExitStack()
        self._servers = services.servers(1 + mode.explorers)
        self._explorers: dict[int, int] = {}  # number of the server -> how often it was started
        folder.mkdir(parents=True)
        shutil.copy(TRAP, folder / "trap.py")
        if mode.name == "vllm" and not PYTHON.exists():
            raise CannotRunError("vLLM is not installed: make vllm-setup")

    # -- before the run

    def write(self, **changes: Any) -> None:
        """Write the run file; later calls add to it. None removes a key."""
        self.changes |= changes
        store = {"memory": {"store": "memory"}, "sqlite": {"store": "sql"}}.get(self.store)
        buffer = store or {"url": self.services.postgres.url}
        run = BASE | {"buffer": buffer}
        for each in (self.mode.changes, self.changes):
            run = {**run, **{key: _laid_over(run.get(key), value) for key, value in each.items()}}
        tiny_run(self.folder, **run)

    def trap(self, kind: str, path: str | None = None, **what: Any) -> str:
        """Add a trap to the plan (see trap.py); returns its name."""
        name = str(len(self.plan["traps"]))
        self.plan["traps"].append({"id": name, "kind": kind} | ({} if path is None else {"path": path}) | what)
        return name

    def pace(self, seconds: float) -> None:
        """Let each reward take so long."""
        self.plan["pace_s"] = seconds

    # -- the run

    def begin(self, *argv: str) -> None:
        """Start the run, with its explorers."""
        if not (self.folder / "run.yaml").exists():
            self.write()
        (self.folder / "plan.json").write_text(json.dumps(self.plan))
        self.tries = 1
        mode = ("--set", "mode=train") if self.mode.explorers else ()
        self._servers[0].start("run", "run.yaml", "--out", self.target, *mode, *argv, folder=self.folder)
        for number in range(1, 1 + self.mode.explorers):
            self.explore(number)

    def again(self) -> None:
        """Go on with the run as a user does: resume it, or start it where it has left nothing."""
        self.tries += 1
        mode = ["--set", "mode=train"] if self.mode.explorers else []
        fresh = ["run", "run.yaml", "--out", self.target, *mode]
        argv = ["resume", self.target] if (self.out / "config.yaml").exists() else fresh
        self._servers[0].start(*argv, folder=self.folder)

    def kill_then_spoil(self, spoil: Callable[[Path], object]) -> None:
        """Kill trainer and command after the second checkpoint, change the run directory, and go on with the run."""
        held = self.trap("optimizer", nth=6, do="hold")
        self.begin()
        self.held(held)
        for pid in {self.process("trainer"), self.pid}:
            send(pid)
        self._servers[0].wait()
        spoil(self.out)
        self.hit()
        self.again()

    @property
    def target(self) -> str:
        """The run directory as the command is given it."""
        return str(self.out.relative_to(self.folder))

    def beside(self, *argv: str) -> None:
        """Start another command, whose end counts; the first one goes on, and has to end well."""
        self._servers = self.services.servers(len(self._servers) + 1)
        self.watched = len(self._servers) - 1
        self._servers[self.watched].start(*argv, folder=self.folder)

    def explore(self, number: int) -> None:
        """Start an explorer."""
        self._explorers[number] = self._explorers.get(number, 0) + 1
        explore = ("--set", "mode=explore", "--out", self.target)
        self._servers[number].start("run", "run.yaml", *explore, folder=self.folder)

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._servers[0].pid

    def explorer_pid(self, number: int) -> int:
        """Process id of an explorer's command, from 1."""
        return self._servers[number].pid

    def process(self, name: str) -> int:
        """Process id of a process of the run, such as `trainer`, by its heartbeat. Raises LookupError."""
        return {beat.name: beat.pid for beat in read_heartbeats(self.out)}[name]

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        path = self.out / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = [row["step"] for row in map(_row, lines) if "version" in row]
        return found[-1] if found else 0

    def wait(self, happened: Callable[[], bool], limit_s: float = 90.0) -> None:
        """Wait until something happens. Raises AssertionError if the command ends before, or at the limit."""
        ends = time.monotonic() + limit_s
        while True:
            try:
                if happened():
                    return
            except LookupError:
                pass
            assert not ended(self.pid), self._servers[0].wait().err
            assert time.monotonic() < ends, "what the fault waits for does not happen"
            time.sleep(0.005)

    def hit(self) -> None:
        """Note that the fault has begun."""
        self.hit_at, self.hit_step = time.time(), self.step()

    def signal(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Note the fault, and send a signal."""
        self.hit()
        assert send(pid, number), "the process has ended by itself"

    def held(self, name: str, limit_s: float = 90.0) -> Path:
        """Wait until a trap that holds is set off; returns the file that lets the run go on."""
        self.wait((self.folder / f"fired-{name}").exists, limit_s)
        self.hit()
        return self.folder / f"go-{name}"

    def wake(self, pid: int) -> None:
        """Continue a process that was stopped."""
        send(pid, signal.SIGCONT)

    # -- its end

    def finish(self, deadline_s: float, *, resumes: bool, max_tries: int = 4) -> Ended | None:
        """Wait until the run ends, and resume it (`resumes`) when it fails; None at the deadline."""
        began = time.time()
        while True:
            self._look()
            if time.time() > (self.hit_at or began) + deadline_s:
                return None
            server = self._servers[self.watched]
            if not ended(server.pid):
                if resumes:
                    self.keep_explorers()
                time.sleep(0.02)
                continue
            end = server.wait()
            if end.code == 0:
                return end
            self.failures.append(end)
            if not resumes or self.tries >= max_tries:
                return end
            self.mend()
            self.again()

    def _look(self) -> None:
        """Note when the fault happened, if a trap did it, and when the run got past it."""
        if self.hit_at is None:
            if fired := sorted(self.folder.glob("fired-*")):
                self.hit()
                self.hit_at = fired[0].stat().st_mtime
        elif self.recovered_at is None and self.step() > self.hit_step:
            self.recovered_at = time.time()

    def output(self) -> str:
        """Return what the command has written until now."""
        return self._servers[0].output()

    def keep_explorers(self) -> None:
        """Start explorers again that have died."""
        for number in self._explorers:
            server = self._servers[number]
            if ended(server.pid) and server.busy and server.wait().code != 0:
                self.explore(number)

    def first_ends(self, limit_s: float = 120.0) -> None:
        """Wait for the first command, where another one beside it was watched."""
        ends = time.monotonic() + limit_s
        while not ended(self.pid) and time.monotonic() < ends:
            time.sleep(0.02)
        self.first = self._servers[0].wait() if ended(self.pid) else None

    def explorers_end(self, limit_s: float = 30.0) -> list[int]:
        """Exit codes of the explorers; None stands for one that stays."""
        ends, codes = time.monotonic() + limit_s, []
        for number in self._explorers:
            server = self._servers[number]
            if not server.busy:
                codes.append(0)
                continue
            while not ended(server.pid) and time.monotonic() < ends:
                time.sleep(0.05)
            codes.append(server.wait().code if ended(server.pid) else -1)
        return codes

    def close(self) -> list[str]:
        """End what is left of the run; returns the processes that were left. Then `cleanup` is to be closed."""
        ends = time.monotonic() + (3 if self.mode.name == "ray" else 15)
        while (
            (left := self._left())
            and time.monotonic() < ends
            and all(ended(each.pid) for each in self._servers if each.busy)
        ):
            time.sleep(0.1)
        names = [" ".join(_words(each))[:80] for each in left]
        if self.mode.name == "ray":  # a forked command cannot end its Ray, which notices it after a while
            names = [each for each in names if "rollmill" in each]
        for each in left:
            send(each.pid, signal.SIGCONT)
            send(each.pid)
        for server in self._servers:
            if server.busy:
                server.wait()
        return names

    def _left(self) -> list[psutil.Process]:
        """Processes that work in the folder."""
        found = []
        for process in psutil.process_iter():
            try:
                inside = process.pid != os.getpid() and Path(process.cwd()).is_relative_to(self.folder)
                if inside and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    # -- things that faults need

    def disk(self, size: str = "8m", options: str = "") -> Path:
        """Put the run directory on a small disk of its own. Raises CannotRunError."""
        folder = self.folder / "disk"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(folder)]
        if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
            raise CannotRunError("mounting a small disk needs root")
        self.cleanup.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
        self.out = folder / "out"
        return folder

    @contextmanager
    def stopped(self, *pids: int) -> Iterator[None]:
        """Stop processes inside."""
        for pid in pids:
            send(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                send(pid, signal.SIGCONT)


def fill(disk: Path, left: int = 0) -> Path:
    """Fill a disk up to `left` bytes; returns the file to remove."""
    filler = disk / "filler"
    filler.write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - left))
    return filler


def _laid_over(base: Any, value: Any) -> Any:
    return base | value if isinstance(base, dict) and isinstance(value, dict) else value


def _row(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
