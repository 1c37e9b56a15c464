"""Programs per second on one core: the sandbox, a plain Python process, and bubblewrap, in turn.

    python libs/sandbox/bench/sandbox_speed.py [--programs 150] [--rounds 5] [--json]

A ratio above 1 means that the sandbox is better. Needs nothing but this library, and bubblewrap for that peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from rollmill_sandbox import Sandbox
from rollmill_sandbox.backend_selection import SAFE_BACKENDS

PROGRAM = "print(6 * 7)"
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
PLAIN = [PYTHON, "-I", "-S", "-c", PROGRAM]  # with `site`, installed packages would slow its start
PEERS = ("python -I -S -c", "bubblewrap")
EXECUTIONS = 500
STARTS = 30


def main(arguments: Sequence[str]) -> int:
    """Print the measured rounds' medians and ratios, then all of it as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=150, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", default=",".join(SAFE_BACKENDS), help="with commas")
    parser.add_argument("--peers", default=",".join(PEERS), help="with commas")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    args = parser.parse_args(arguments)
    backends, peers = args.backends.split(","), args.peers.split(",")
    if "bubblewrap" in peers and shutil.which("bwrap") is None:
        print("bubblewrap is not installed: apt-get install bubblewrap, or --peers 'python -I -S -c'", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with ExitStack() as stack:
        sandboxes = {name: stack.enter_context(Sandbox(jobs=1, backend=name)) for name in backends}
        runners = {name: run_in_sandbox(sandbox) for name, sandbox in sandboxes.items()}
        runners |= {name: run_command(bubblewrap() if name == "bubblewrap" else PLAIN) for name in peers}
        for once in runners.values():
            once()
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
        for number in range(args.rounds):
            for name in list(runners)[:: -1 if number % 2 else 1]:
                rounds[name].append(time_programs(runners[name], args.programs))
        sessions = {name: asyncio.run(time_sessions(sandbox)) for name, sandbox in sandboxes.items()}
    cases = [_compare(backend, peer, rounds[backend], rounds[peer]) for backend in backends for peer in peers]
    if not args.json:
        for case in cases:
            print(
                f"{case['backend']:<12}{case['ours']:8.1f} programs/s   {case['peer_name']:<16}{case['peer']:8.1f}"
                f"   ratio {case['ratio']:.2f} ({case['ratio_min']:.2f} to {case['ratio_max']:.2f})"
            )
        for name, found in sessions.items():
            print(
                f"{name}: a session starts in {found['session_start_ms']:.2f} ms, an execution in it takes "
                f"{found['execute_ms']:.3f} ms"
            )
    print(json.dumps({"bench": "sandbox_speed", "cases": cases, "sessions": sessions, "rounds": rounds}))
    return 0


def run_in_sandbox(sandbox: Sandbox) -> Callable[[], str]:
    """Return a function that runs the program in a sandbox and returns its output."""
    return lambda: sandbox.run_sync(PROGRAM).stdout


def run_command(command: list[str]) -> Callable[[], str]:
    """Return a function that runs a command without environment variables and returns its output."""
    return lambda: subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={}).stdout


def time_programs(once: Callable[[], str], count: int) -> dict[str, float]:
    """Return the median milliseconds of one program, and programs per second, one after the other."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        output = once()
        seconds.append(time.perf_counter() - began)
        assert output == "42\n", output
    return {"ms": statistics.median(seconds) * 1e3, "per_second": count / sum(seconds)}


async def time_sessions(sandbox: Sandbox) -> dict[str, float]:
    """Return the median milliseconds to start a session, and of an execution's round trip."""
    starts, trips = [], []
    for _ in range(STARTS):
        began = time.perf_counter()
        async with sandbox.session():
            starts.append(time.perf_counter() - began)
    async with sandbox.session() as session:
        for _ in range(EXECUTIONS):
            began = time.perf_counter()
            assert (await session.execute("1 + 1")).value == "2"
            trips.append(time.perf_counter() - began)
    return {"session_start_ms": statistics.median(starts) * 1e3, "execute_ms": statistics.median(trips) * 1e3}


def bubblewrap() -> list[str]:
    """Return the program in bubblewrap, isolated as in its manual: every namespace, read-only files."""
    seen = [path for path in ("/usr", sys.base_prefix) if path == "/usr" or not path.startswith("/usr/")]
    binds = [part for path in dict.fromkeys(seen) for part in ("--ro-bind", path, path)]
    for path in ("/lib", "/lib64", "/bin"):
        binds += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    fences = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"]
    folder = ["--dev", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return ["bwrap", *fences, *binds, *folder, *PLAIN]


def _compare(backend: str, peer: str, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    """Compare programs per second, round by round."""
    ratios = [one["per_second"] / other["per_second"] for one, other in zip(ours, theirs, strict=True)]
    return {
        "backend": backend,
        "peer_name": peer,
        "ours": round(statistics.median(each["per_second"] for each in ours), 1),
        "peer": round(statistics.median(each["per_second"] for each in theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
