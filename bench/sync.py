"""Weight transfer from the trainer's process to an engine's, in GB per second: each transport against a memory copy.

A transfer ends when the other process has verified the weights and can decode with them. All files are in memory
(/dev/shm). `delta` changes one weight in 500, about as many as an update at a small learning rate changes in bf16; its
rate counts all bytes of the model, and `sent` has the transferred ones.
"""

from __future__ import annotations

import argparse
import statistics

from bench.harness import Side, run_in_turn
from bench.report import Case, finish

TRANSPORTS = ("shared", "broadcast", "folder", "delta", "pickled")


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench sync", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=400)
    args = parser.parse_args(arguments)
    size = ("--megabytes", str(args.megabytes))
    sides = [Side(kind, "bench.ours.sync", (kind, *size)) for kind in (*TRANSPORTS, "memory")]
    measured = {one.name: one for one in run_in_turn(sides, args.rounds, warmups=2, pinned=False)}
    memory = measured.pop("memory")
    cases = [
        Case(
            name,
            "memory copy",
            "GB/s",
            one.values("gb_per_s"),
            memory.values("gb_per_s"),
            True,
            {"sent": round(statistics.median(one.values("bytes")))},
        )
        for name, one in measured.items()
    ]
    finish(
        "sync",
        cases,
        headline=cases[:1],
        versions=memory.ready["versions"],
        only_json=only_json,
        raw=[*measured.values(), memory],
    )
