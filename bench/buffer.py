"""Experiences of 1,000 tokens per second, written and read in batches of 256: the buffer on SQLite against others."""

from __future__ import annotations

import argparse
import statistics

from bench.harness import Measured, Side, need, note, run_in_turn
from bench.report import Case, finish

PEERS = {"pickled": "pickled rows in SQLite", "ray": "ray.util.queue"}
WAYS = ("written", "read")


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench buffer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40, help="of 256 experiences, in each round")
    parser.add_argument("--postgres", default="", metavar="URL", help="measure this database, too (`make postgres`)")
    args = parser.parse_args(arguments)
    need("ray", "pip install 'rollmill[bench]'")
    batches = str(args.batches)
    sides = [Side("ours, SQLite", "bench.ours.buffer", (batches, ""))]
    sides += [Side("ours, PostgreSQL", "bench.ours.buffer", (batches, args.postgres))] if args.postgres else []
    sides += [Side(name, "bench.peers.buffers", (kind, batches)) for kind, name in PEERS.items()]
    sides.append(Side("a file", "bench.peers.buffers", ("file", batches)))
    measured = {one.name: one for one in run_in_turn(sides, args.rounds, pinned=False)}
    file = measured.pop("a file")
    headline = [
        Case(f"{way}, {peer}", peer, "experiences/s", ours.values(way), measured[peer].values(way), True)
        for ours in [measured["ours, SQLite"]]
        for peer in PEERS.values()
        for way in WAYS
    ]
    cases = [
        *headline,
        *(case for name, one in measured.items() if name.startswith("ours") for case in _of_file(one, file)),
    ]
    for name, one in measured.items():
        note(f"  {name}: " + ", ".join(f"{statistics.median(one.values(way)):.0f}/s {way}" for way in WAYS))
    versions = {one.name: one.ready["versions"] for one in [*measured.values(), file]}
    everyone = [*measured.values(), file]
    finish("buffer", cases, headline=headline, versions=versions, only_json=only_json, raw=everyone)


def _of_file(ours: Measured, file: Measured) -> list[Case]:
    """Compare with the same bytes appended to a file with fsync per batch, without and with the time to encode them."""
    extra = {"bytes_each": round(file.values("bytes")[0]), "read": round(statistics.median(ours.values("read")))}
    names = {"written": "the bytes alone", "encoded": "bytes made on the way"}
    return [
        Case(
            f"{ours.name}, written: {text}",
            "file, fsync per batch",
            "experiences/s",
            ours.values("written"),
            file.values(way),
            True,
            extra,
        )
        for way, text in names.items()
    ]
