"""Steps per second of many workers, simulated with measured costs; two workers are also measured, as a check.

Pacing, explorers, a trainer and weight transfers are simulated (rollmill.apps.plan.planning.simulation) with decode
passes, training times and transfers measured in the same run: GRPO on the 3.2M model, 8 prompts x 8 completions per
step. Two workers share this machine, so each one's costs are measured while another process does the other one's work;
without staleness they take turns, and costs are those of a single process. So are those of 8, 64 and 512 workers, whose
network is simulated as a transfer in memory.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench.harness import Measured, Side, need, note, run_in_turn
from bench.models import PROMPT
from bench.report import Case, finish

STEPS = 200


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench simulate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="measured, in each round")
    parser.add_argument("--staleness", default="0,1,4")
    parser.add_argument("--workers", default="2,8,64,512")
    parser.add_argument("--model", default="m3")
    parser.add_argument("--prompts", default="8")
    parser.add_argument("--new-tokens", default="96")
    parser.add_argument("--settle", default="12", help="seconds until the other process is at work")
    args = parser.parse_args(arguments)
    need("ray", "pip install 'rollmill[ray]'")
    counts = ("--steps", str(args.steps), "--new-tokens", args.new_tokens, "--prompts", args.prompts)
    sizes = ("--model", args.model, *counts)
    staleness = [int(each) for each in args.staleness.split(",")]
    on_ray = ("--placement", "ray", "--max-staleness")
    sides = [
        Side("alone", "bench.ours.costs", sizes),
        Side("beside", "bench.ours.costs", (*sizes, "--beside", "--settle", args.settle)),
        *[Side(str(bound), "bench.ours.overlapped", (*sizes, *on_ray, str(bound))) for bound in staleness],
    ]
    alone, beside, *measured = run_in_turn(sides, args.rounds, warmups=args.warmups, pinned=False)
    cases = [
        compare(beside if int(one.name) else alone, one, int(args.prompts), int(args.new_tokens)) for one in measured
    ]
    workers = [int(each) for each in args.workers.split(",")]
    table = predictions(alone.rounds, workers, staleness, int(args.prompts), int(args.new_tokens))
    cases[0].extra["predicted"] = table
    for row in table:
        note(f"  {row}")
    versions = measured[0].ready["versions"]
    finish("simulate", cases, versions=versions, only_json=only_json, raw=[alone, beside, *measured])


def compare(parts: Measured, measured: Measured, batch: int, tokens: int) -> Case:
    """Compare predicted and measured steps per second of two workers, round by round."""
    bound = int(measured.name)
    predicted = [simulated(costs, 1, bound, batch, tokens) for costs in parts.rounds]
    rates = measured.values("steps_per_s")
    off = statistics.median(predicted) / statistics.median(rates) - 1
    extra = {"off_by": round(off, 3), "staleness_measured": max(measured.values("staleness"))}
    note(f"  2 workers, max_staleness {bound}: predicted {statistics.median(predicted):.3g} steps/s, off by {off:+.1%}")
    return Case(f"max_staleness {bound}", "measured", "steps/s", predicted, rates, higher_is_better=True, extra=extra)


def predictions(
    rounds: list[dict[str, Any]], workers: list[int], staleness: list[int], batch: int, tokens: int
) -> list[dict[str, Any]]:
    """Steps per second by workers and staleness: with one trainer and a fixed batch, and with a batch that grows with
    the workers and the fastest number of trainer ranks, which split the passes evenly and all-reduce gradients."""
    rows = []
    for count in workers:
        for bound in staleness:
            one = statistics.median(simulated(costs, count - 1, bound, batch, tokens) for costs in rounds)
            larger, split = batch * count // 2, []
            for ranks in sorted({max(1, count * share // 16) for share in range(1, 16)}):
                rate = simulated(rounds[0], count - ranks, bound, larger, tokens, ranks=ranks, steps=24)
                split.append((rate, ranks))
            rate, ranks = max(split)
            grown = {"groups": larger, "steps_per_s": round(rate, 4), "trainer_ranks": ranks}
            rows.append({"workers": count, "max_staleness": bound, "steps_per_s": round(one, 4), "larger_batch": grown})
    return rows


def simulated(
    costs: dict[str, Any], explorers: int, bound: int, batch: int, tokens: int, *, ranks: int = 1, steps: int = STEPS
) -> float:
    """Simulated steps per second."""
    from rollmill.apps.plan.planning.simulation import simulate_stage
    from rollmill.apps.plan.simulation.engine import SimulationCosts
    from rollmill.orchestrator.pacing import Pacing

    passes = costs["passes"]
    step = SimulationCosts(
        groups=[[tokens] * 8],
        train_s=training(costs, batch, ranks),
        pass_s=passes["step"],
        row_s=passes["token"] + passes["attended"] * (PROMPT + tokens / 2),
        group_s=costs["group_s"] + passes["prompt"] * PROMPT,
        judge_s=costs["judge_s"],
        publish_s=costs["publish_s"],
        receive_s=costs["take_s"],
        recompute_s=costs["again_s"],
    )
    return 1 / simulate_stage(step, Pacing(batch, bound, 10**6), explorers, steps=steps).step_s()


def training(costs: dict[str, Any], batch: int, ranks: int) -> list[float]:
    """Training times of a batch, extrapolated linearly from both measured batches.

    Ranks split the part that grows with the batch, and transfer gradients twice, at the rate of the weight transfer.
    """
    from rollmill.apps.plan.planning.rollouts import fit_line

    times = {int(size): values for size, values in costs["train_s"].items()}
    largest = max(times)
    constant, slope = fit_line(list(times), [statistics.median(values) for values in times.values()])
    expected = constant + slope * batch / ranks + (2 * costs["publish_s"] if ranks > 1 else 0.0)
    middle = statistics.median(times[largest])
    return [each / middle * (middle if (batch, ranks) == (largest, 1) else expected) for each in times[largest]]
