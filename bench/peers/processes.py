"""Worker: a trivial program in a plain Python process, or in bubblewrap."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from bench.worker import Channel, serve, versions

PROGRAM = "print(6 * 7)"
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
PLAIN = [PYTHON, "-I", "-S", "-c", PROGRAM]  # with `site`, installed packages would slow its start


def timed(once: Callable[[], str], count: int) -> dict[str, float]:
    """Median milliseconds of one program, and programs per second, one after the other."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        output = once()
        seconds.append(time.perf_counter() - began)
        assert output == "42\n", output
    return {"ms": statistics.median(seconds) * 1e3, "per_second": count / sum(seconds)}


def bubblewrap() -> list[str]:
    """Command of the same program in bubblewrap, isolated as in its manual: every namespace, read-only files."""
    seen = [path for path in ("/usr", sys.base_prefix) if path == "/usr" or not path.startswith("/usr/")]
    binds = [part for path in dict.fromkeys(seen) for part in ("--ro-bind", path, path)]
    for path in ("/lib", "/lib64", "/bin"):
        binds += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    fences = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"]
    return [
        "bwrap",
        *fences,
        *binds,
        "--dev",
        "/dev",
        "--size",
        str(64 << 20),
        "--tmpfs",
        "/tmp",
        "--chdir",
        "/tmp",
        *PLAIN,
    ]


def main() -> None:
    channel = Channel()
    command = bubblewrap() if sys.argv[1] == "bubblewrap" else PLAIN

    def once() -> str:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={}).stdout

    found = versions()
    if sys.argv[1] == "bubblewrap":
        words = subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout.split()
        found["bubblewrap"] = words[-1]
    serve(channel, lambda: timed(once, int(sys.argv[2])), versions=found)


if __name__ == "__main__":
    main()
