"""Seconds to load a checkpoint of 0.6B parameters with Adam's two moments: verified meanwhile, against unverified.

Both load the same files in turn, in one process with two threads: policy, state and optimizer, as `rollmill resume`
does. The files are in the page cache, where hashing weighs most; from a slower disk it hides behind reading.
`write_seconds` is the time to write the checkpoint, hashed and flushed to the disk; `hash_seconds` is that of hashing.
"""

from __future__ import annotations

import argparse

from bench.harness import Side, run_in_turn
from bench.report import Case, finish

TYPES = ("bfloat16", "float32")


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="m600")
    args = parser.parse_args(arguments)
    cases, measured = [], []
    for dtype in TYPES:  # one after the other: their files are large
        side = Side(dtype, "bench.ours.checkpoint", ("--model", args.model, "--dtype", dtype))
        [one] = run_in_turn([side], args.rounds, pinned=False)
        measured.append(one)
        extra = {key: one.ready[key] for key in ("gigabytes", "write_seconds", "hash_seconds", "hash_gb_per_s")}
        cases.append(Case(dtype, "unverified", "s", one.values("verified"), one.values("unverified"), False, extra))
    versions = measured[0].ready["versions"]
    finish("checkpoint", cases, versions=versions, threads=2, only_json=only_json, raw=measured)
