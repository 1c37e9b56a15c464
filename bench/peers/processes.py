"""Worker: a trivial program in a plain Python process, or in bubblewrap."""

from __future__ import annotations

import subprocess
import sys

from sandbox_speed import PLAIN, bubblewrap, run_command, time_programs

from bench.worker import Channel, serve, versions


def main() -> None:
    channel = Channel()
    kind, count = sys.argv[1], int(sys.argv[2])
    once = run_command(bubblewrap() if kind == "bubblewrap" else PLAIN)
    found = versions()
    if kind == "bubblewrap":
        words = subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout.split()
        found["bubblewrap"] = words[-1]
    serve(channel, lambda: time_programs(once, count), versions=found)


if __name__ == "__main__":
    main()
