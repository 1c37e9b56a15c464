"""Steps per second of trainer and explorer in separate processes (Ray, two cores), against both in one process in turn.

GRPO on the 3.2M model, 64 completions (8 prompts x 8) per step. With max_staleness 1 or more the explorer rolls out
the next step while the trainer trains, so the bound is the sum of both phases over the longer one, at most 2. When
weights change, keys and values of running completions are recomputed, or (`keep`) kept.
"""

from __future__ import annotations

import argparse
import statistics

from bench.harness import Measured, Side, need, run_in_turn
from bench.report import Case, finish


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench asynchronous", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="in each round")
    parser.add_argument("--staleness", default="1,4")
    parser.add_argument("--model", default="m3")
    parser.add_argument("--new-tokens", default="96")
    args = parser.parse_args(arguments)
    need("ray", "pip install 'rollmill[ray]'")
    common = ("--model", args.model, "--steps", str(args.steps), "--new-tokens", args.new_tokens)
    sides = []
    for bound in args.staleness.split(","):
        apart = (*common, "--placement", "ray", "--max-staleness", bound)
        sides.append(Side(f"max_staleness {bound}", "bench.ours.overlapped", apart))
        sides.append(Side(f"max_staleness {bound}, keep", "bench.ours.overlapped", (*apart, "--after-update", "keep")))
    sides.append(Side("in turn", "bench.ours.overlapped", (*common, "--placement", "inline")))
    *ours, peer = run_in_turn(sides, args.rounds, warmups=1, pinned=False)
    cases = [compare(one, peer) for one in ours]
    raw = [*ours, peer]
    finish("asynchronous", cases, headline=cases[-1:], versions=ours[0].ready["versions"], only_json=only_json, raw=raw)


def compare(ours: Measured, peer: Measured) -> Case:
    """Steps per second, the bound from the phases, and the staleness of tokens."""
    phases = {
        key: statistics.median(each["phases"][key] for each in peer.rounds) for key in ("rollout", "train", "total")
    }
    bound = phases["total"] / max(phases["train"], phases["rollout"])
    extra = {"bound": round(bound, 2), "phases_in_turn": phases, "staleness": max(ours.values("staleness"))}
    rates = ours.values("steps_per_s"), peer.values("steps_per_s")
    return Case(ours.name, "in turn", "steps/s", *rates, higher_is_better=True, extra=extra)
