"""Speed of this checkout against that of an earlier commit, measured in turn.

Both sides are the workers of the other benchmarks, each with the sources of its own checkout:
git worktree add FOLDER COMMIT; python -m bench before FOLDER.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench import machine, memory, overlap, packing, ranks, rollout, spec, sync, tail
from bench.harness import RESULTS, BenchError, Measured, Side, note, run_in_turn
from bench.report import Case, finish

UNITS = {
    "tokens_per_s": ("tokens/s", True),
    "per_second": ("1/s", True),
    "steps_per_s": ("steps/s", True),
    "gb_per_s": ("GB/s", True),
    "written": ("experiences/s", True),
    "read": ("experiences/s", True),
    "seconds": ("s", False),
    "together_s": ("s", False),
    "ms": ("ms", False),
    "execute_ms": ("ms", False),
    "gib": ("GiB", False),
}
"""Unit of a key of a worker's report, and whether more is better."""


@dataclass(frozen=True)
class Compared:
    """A contestant of another benchmark, and the keys of its reports that are compared."""

    side: Callable[[], Side]
    keys: tuple[str, ...] = ("seconds",)
    rounds: int = 5
    warmups: int = 2
    pinned: bool = True
    pairs: int = 2
    """Pairs of processes, each with that many rounds. What is bound by memory differs from process to process, by the
    pages that each happens to get, and the one that starts first was the slower one: an even number is fair."""


def _worker(module: str, *options: str) -> Callable[[], Side]:
    return lambda: Side(module, f"bench.ours.{module}", options)


def _passes(model: str, groups: list[tuple[int, list[int]]]) -> Callable[[], Side]:
    return _worker("passes", "--model", model, "--groups", json.dumps(groups), "--dtype", "fp32")


def _rollout(model: str) -> Callable[[], Side]:
    return lambda: rollout.sides(model, "auto", "", {"vllm", "hf"})[0]


def _step(module: str, model: str) -> Callable[[], Side]:
    return _worker(module, "--model", model, "--dtype", "auto")


def _spec() -> Side:
    folder = spec.warm_started(8, 420)
    return _worker("spec", *f"--folder {folder} --digits 8 --steps 2 --batch 4 --lr 1e-4 --reuse".split())()


def _sampling() -> Side:
    """With freed memory kept, as a run keeps it: else a process gives 39 MB back after each call, or happens not to."""
    kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    return replace(_worker("sampling", "--rows", "64", "--vocab", "151936")(), env=kept)


def _tail() -> Side:
    model, size = tail.MODELS["tiny"]
    partial = json.dumps({"token_budget": size.budget})
    return _worker("tail", "--model", model, *size.arguments(), "--max-staleness", "2", "--rollout", partial)()


RATE = ("tokens_per_s",)
OVERLAPPED = ["--model", "m3", "--steps", "10", "--new-tokens", "96", "--placement", "ray", "--max-staleness", "1"]
CASES = {
    "rollout m3": Compared(_rollout("m3"), RATE),
    "rollout m25": Compared(_rollout("m25"), RATE, 3),
    "rollout m600": Compared(_rollout("m600"), RATE, 2, pairs=1),
    "step m3": Compared(_step("step", "m3"), rounds=7),
    "step m25": Compared(_step("step", "m25")),
    "train_step m3": Compared(_step("train_step", "m3"), rounds=7),
    "train_step m25": Compared(_step("train_step", "m25")),
    "prefix m25": Compared(_passes("m25", [(512, [128] * 8)])),
    "long m3": Compared(_passes("m3", [(64, [1024] * 4)])),
    "packing m3": Compared(_passes("m3", packing.lengths(64, 64, 512))),
    "sampling": Compared(_sampling, ("ms",), 5, pairs=4),
    "logprob": Compared(_worker("logprob", "--tokens", "2048", "--vocab", "151936", "--hidden", "256"), rounds=3),
    "tail": Compared(_tail, ("per_second",), 3, 0, pairs=1),
    "spec": Compared(_spec, RATE, 3, pairs=1),
    "grade": Compared(_worker("grade"), ("per_second",), 3, 1, pinned=False, pairs=4),
    "sandbox": Compared(_worker("sandbox", "namespaces", "150"), ("ms", "per_second", "execute_ms")),
    "overlap m25": Compared(
        _worker("overlap", "--model", "m25", *overlap.SIZES["m25"]), ("together_s",), 3, 1, pinned=False
    ),
    "buffer": Compared(_worker("buffer", "40", ""), ("written", "read"), 7, pinned=False, pairs=4),
    **{
        f"sync {kind}": Compared(_worker("sync", kind, "--megabytes", "400"), ("gb_per_s",), 7, pinned=False, pairs=4)
        for kind in sync.TRANSPORTS
        if kind != "pickled"
    },
    **{
        f"memory m135 {way}": Compared(
            _worker("memory", "--model", "m135", *memory.SIZE, "--way", way), ("gib",), 1, 0, pinned=False
        )
        for way in ("fp32 weights", "bf16 weights", "LoRA over bf16 weights")
    },
    "asynchronous m3": Compared(
        _worker("overlapped", *OVERLAPPED),
        ("steps_per_s",),
        3,
        1,
        pinned=False,
        pairs=1,
    ),
    **{
        f"ranks {sharding}": Compared(
            _worker("ranks", "--model", "m3", "--ranks", "2", "--sharding", sharding), RATE, pinned=False
        )
        for sharding in ranks.SHARDINGS
    },
}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench before", description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of the earlier commit")
    parser.add_argument(
        "--only", default=",".join(CASES), help="cases to measure, with commas; others keep their results"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--at-least", type=float, default=0.0, help="end with an error if a best ratio is below this")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where before.json is written")
    args = parser.parse_args(arguments)
    checkout = args.checkout.resolve()
    if not (checkout / "src" / "rollmill").is_dir() or not (checkout / "bench" / "ours").is_dir():
        raise BenchError(f"{checkout}: no checkout of rollmill there; make one with git worktree add")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    if unknown := set(args.only.split(",")) - set(CASES):
        raise BenchError(f"--only: there is no case `{min(unknown)}`; there are {', '.join(CASES)}")
    found = _stored(commit, args.folder)
    for name in args.only.split(","):
        compared = CASES[name]
        note(f"{name}:")
        side = replace(compared.side(), name=f"now, {name}")
        earlier = replace(side, name=f"before, {name}", checkout=checkout)
        rounds = args.rounds or compared.rounds
        runs = []
        for pair in range(compared.pairs):  # the sides start first in turn
            backwards = -1 if pair % 2 else 1
            sides = [side, earlier][::backwards]
            measured = run_in_turn(sides, rounds, warmups=compared.warmups, pinned=compared.pinned)
            runs.append(measured[::backwards])
        ours, peer = (
            Measured(parts[0].name, parts[0].ready, [each for part in parts for each in part.rounds])
            for parts in zip(*runs, strict=True)
        )
        ours.ready["date"] = machine.describe()["date"]
        found[name] = ours, peer
        cases = _write(commit, found, args.folder, only_json, done=False)
    _write(commit, found, args.folder, only_json, done=True)
    if slower := [f"{case.case} ({case.best_ratio:.2f})" for case in cases if case.best_ratio < args.at_least]:
        raise BenchError(f"slower than {args.at_least} of {commit[:8]}: {', '.join(slower)}")


def _write(
    commit: str, found: dict[str, tuple[Measured, Measured]], folder: Path, only_json: bool, *, done: bool
) -> list[Case]:
    """Write the results so far, in the order of `CASES`, print them when `done`, and return them."""
    names = [name for name in CASES if name in found]
    raw = [one for name in names for one in found[name]]
    cases = [case for name in names for case in _cases(name, commit, *found[name])]
    versions = raw[0].ready["versions"]
    finish("before", cases, versions=versions, only_json=only_json, folder=folder, raw=raw, done=done)
    return cases


def _cases(name: str, commit: str, ours: Measured, peer: Measured) -> Iterator[Case]:
    """Compare each key of a case, with the date of the measurement."""
    extra = {"date": ours.ready["date"]}
    if "dtype" in ours.ready:
        extra["dtypes"] = [one.ready["dtype"] for one in (ours, peer)]
    keys = CASES[name].keys
    for key in keys:
        unit, higher = UNITS[key]
        title = f"{name}, {key}" if len(keys) > 1 else name
        yield Case(title, commit[:8], unit, ours.values(key), peer.values(key), higher, extra)


def _stored(commit: str, folder: Path) -> dict[str, tuple[Measured, Measured]]:
    """Results of earlier runs against the same commit on such a machine, by case: `--only` measures others anew."""
    path = folder / "before.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    if stored.get("peer_name") != commit[:8] or stored["machine"]["cpu"] != machine.describe()["cpu"]:
        return {}
    sides = {one["name"]: Measured(**one) for one in stored["raw"]}
    return {name: (sides[f"now, {name}"], sides[f"before, {name}"]) for name in CASES if f"now, {name}" in sides}
