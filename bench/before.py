"""Speed of this checkout against that of an earlier commit, measured in turn on one core.

Both sides are the workers of the other benchmarks, each with the sources of its own checkout:
git worktree add FOLDER COMMIT; python -m bench before FOLDER.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench import packing, rollout
from bench.harness import BenchError, Measured, Side, note, run_in_turn
from bench.report import Case, finish


@dataclass(frozen=True)
class Compared:
    """A contestant of another benchmark, and the key of its reports that is compared."""

    side: Callable[[], Side]
    key: str
    unit: str
    rounds: int = 5
    higher_is_better: bool = False


def _passes(model: str, groups: list[tuple[int, list[int]]]) -> Callable[[], Side]:
    options = ("--model", model, "--groups", json.dumps(groups), "--dtype", "fp32")
    return lambda: Side("passes", "bench.ours.passes", options)


def _rollout(model: str) -> Callable[[], Side]:
    return lambda: rollout.sides(model, "auto", "", {"vllm", "hf"})[0]


def _step(module: str, model: str) -> Callable[[], Side]:
    return lambda: Side(module, f"bench.ours.{module}", ("--model", model, "--dtype", "auto"))


CASES = {
    "rollout m3": Compared(_rollout("m3"), "tokens_per_s", "tokens/s", higher_is_better=True),
    "rollout m25": Compared(_rollout("m25"), "tokens_per_s", "tokens/s", 3, higher_is_better=True),
    "rollout m600": Compared(_rollout("m600"), "tokens_per_s", "tokens/s", 2, higher_is_better=True),
    "step m3": Compared(_step("step", "m3"), "seconds", "s", 7),
    "step m25": Compared(_step("step", "m25"), "seconds", "s"),
    "train_step m3": Compared(_step("train_step", "m3"), "seconds", "s", 7),
    "train_step m25": Compared(_step("train_step", "m25"), "seconds", "s"),
    "prefix m25": Compared(_passes("m25", [(512, [128] * 8)]), "seconds", "s"),
    "packing m3": Compared(_passes("m3", packing.lengths(64, 64, 512)), "seconds", "s"),
    "sampling": Compared(
        lambda: Side("sampling", "bench.ours.sampling", ("--rows", "64", "--vocab", "151936")), "ms", "ms", 7
    ),
    "logprob": Compared(
        lambda: Side("logprob", "bench.ours.logprob", ("--tokens", "2048", "--vocab", "151936", "--hidden", "256")),
        "seconds",
        "s",
        3,
    ),
}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench before", description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of the earlier commit")
    parser.add_argument("--only", default=",".join(CASES), help="cases, with commas")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args(arguments)
    checkout = args.checkout.resolve()
    if not (checkout / "src" / "rollmill").is_dir() or not (checkout / "bench" / "ours").is_dir():
        raise BenchError(f"{checkout}: no checkout of rollmill there; make one with git worktree add")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.only.split(","):
        compared = CASES[name]
        note(f"{name}:")
        side = replace(compared.side(), name=f"now, {name}")
        earlier = replace(side, name=f"before, {name}", checkout=checkout)
        ours, peer = run_in_turn([side, earlier], args.rounds or compared.rounds, warmups=2)
        values = ours.values(compared.key), peer.values(compared.key)
        extra = {"dtypes": [one.ready.get("dtype") for one in (ours, peer)]}
        cases.append(Case(name, commit[:8], compared.unit, *values, compared.higher_is_better, extra))
        raw += [ours, peer]
    versions = {one.name: one.ready["versions"] for one in raw}
    finish("before", cases, versions=versions, only_json=only_json, raw=raw)
