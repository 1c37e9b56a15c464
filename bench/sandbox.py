"""Programs per second on one core, and milliseconds from start to result: our sandbox, plain Python and bubblewrap."""

from __future__ import annotations

import argparse
import shutil
import statistics
from pathlib import Path

from bench.harness import BenchError, Measured, Side, note, run_in_turn
from bench.report import Case, finish

BACKENDS = ("namespaces", "landlock")
PEERS = {"plain": "python -I -S -c", "bubblewrap": "bubblewrap"}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", default=",".join(BACKENDS), help="ours, with commas; the first is the headline")
    parser.add_argument("--programs", type=int, default=150, help="in each round")
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit, measured in turn with this one")
    args = parser.parse_args(arguments)
    if shutil.which("bwrap") is None:
        raise BenchError("the peer bubblewrap is not installed: apt-get install -y bubblewrap (or your system's way)")
    backends = args.backends.split(",")
    count = str(args.programs)
    measured = run_in_turn(
        [Side(f"ours, {backend}", "bench.ours.sandbox", (backend, count)) for backend in backends]
        + [Side(name, "bench.peers.processes", (kind, count)) for kind, name in PEERS.items()]
        + [_earlier(backend, count, args.before) for backend in backends if args.before],
        args.rounds,
    )
    ours, others = measured[: len(backends)], measured[len(backends) :]
    peers, earlier = others[: len(PEERS)], others[len(PEERS) :]
    cases = [case for one, backend in zip(ours, backends, strict=True) for case in _cases(one, backend, peers)]
    for one, backend, before in zip(ours, backends, earlier, strict=False):
        cases += _cases(one, backend, [before])
    for one in ours:
        trip, start = (statistics.median(one.values(key)) for key in ("execute_ms", "session_start_ms"))
        note(f"  {one.name}: a session starts in {start:.2f} ms, an execution in it takes {trip:.3f} ms")
    versions = {one.name: one.ready["versions"] for one in measured}
    headline = cases[: 2 * len(peers)]
    finish("sandbox", cases, headline=headline, versions=versions, only_json=only_json, raw=measured)


def _earlier(backend: str, count: str, checkout: Path) -> Side:
    """Our sandbox as it was in another checkout."""
    if not (checkout / "bench" / "ours" / "sandbox.py").is_file():
        raise BenchError(f"--before {checkout}: no checkout of rollmill there; make one with git worktree add")
    return Side(f"before, {backend}", "bench.ours.sandbox", (backend, count), checkout=checkout.resolve())


def _cases(ours: Measured, backend: str, peers: list[Measured]) -> list[Case]:
    session = {key: round(statistics.median(ours.values(key)), 3) for key in ("session_start_ms", "execute_ms")}
    return [
        Case(f"{backend}, {name}", peer.name, unit, ours.values(key), peer.values(key), higher, session)
        for peer in peers
        for name, unit, key, higher in (
            ("latency", "ms", "ms", False),
            ("throughput", "programs/s", "per_second", True),
        )
    ]
