"""The orchestrator's code on virtual time, with faults: `python -m bench simulation [--seed N | --seeds N | --bugs]`.

Each seed is one history: a run with up to 1,000 explorers, trainer ranks, judges and a store, and what goes wrong on
the way. Invariants are checked after every event (`invariants.py`). `--seed N` replays one seed and prints its history.
`--bugs` plants bugs in the real code, one at a time, and looks for the first seed that finds each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from bench.harness import note


def main(arguments: list[str], only_json: bool) -> int:
    """Run the benchmark. Exit code 1 if an invariant is violated, or too few bugs are found."""
    parser = argparse.ArgumentParser(prog="bench simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and print its history")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--bug", help="with --seed: with this bug planted; with --bugs: those whose names have this")
    parser.add_argument("--bugs", action="store_true", help="look for all planted bugs, and write the table")
    args = parser.parse_args(arguments)
    if args.bugs:
        from bench.simulation.planted import search

        return search(args.seeds, args.bug or "")
    if args.seed is not None:
        return _replay(args.seed, args.bug)
    return _many(range(args.first, args.first + args.seeds))


def _replay(seed: int, bug: str | None) -> int:
    from bench.simulation.planted import planted
    from bench.simulation.scenario import draw_scenario
    from bench.simulation.world import simulate_seed

    scenario = draw_scenario(seed)
    print(scenario)
    with planted(bug):
        outcome = simulate_seed(scenario)
    for event in outcome.events:
        print(event)
    print(outcome.violation or f"every invariant holds; history {outcome.digest}")
    return int(outcome.violation is not None)


def _many(seeds: range) -> int:
    from bench.simulation.scenario import draw_scenario
    from bench.simulation.world import simulate_seed

    began, failed, counted = time.perf_counter(), list[int](), Counter[str]()
    for seed in seeds:
        outcome = simulate_seed(draw_scenario(seed))
        counted.update(event.kind for event in outcome.events)
        if outcome.violation is not None:
            failed.append(seed)
            note(f"  seed {seed}: {outcome.violation}; replay it: python -m bench simulation --seed {seed}")
    seconds = time.perf_counter() - began
    line = {"bench": "simulation", "seeds": len(seeds), "failed": failed, "events": counted.total()}
    print(json.dumps(line | {"seconds": round(seconds, 1)}))
    return int(bool(failed))
