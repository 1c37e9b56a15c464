"""Tokens per second of a second epoch's rollouts: earlier completions as drafts against plain sampling.

Per round both sides start from the same checkpoint: the quickstart's warm start, on sums of `--digits` digits. They
roll out `--steps` batches of 4 x 8 (and of 16 x 8) completions, with a real GRPO step after each, and then the same
tasks once more. The second epoch is measured, from the first prompt to the last reward.

Each round also scores the measured completions with the weights that they were sampled from: the sum over tokens of
log p minus its expectation, in standard deviations (`score_z`), is standard normal if sampling is exact. It reports
the share of accepted draft tokens, and tokens per verification pass.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import yaml

from bench.harness import Measured, Side, run_in_turn
from bench.learn import RUN_FILE, checkpoint
from bench.report import Case, finish


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench spec", description=__doc__)
    parser.add_argument("--digits", type=int, default=8)
    parser.add_argument("--lr", default="1e-4")
    parser.add_argument("--batches", default="4,16", help="prompts of a batch")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-steps", type=int, default=420)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    folder = warm_started(args.digits, args.warm_steps)
    cases, raw = [], []
    for batch in args.batches.split(","):
        common = ["--folder", str(folder), "--digits", str(args.digits), "--steps", str(args.steps)]
        common += ["--batch", batch, "--lr", args.lr]
        sides = [
            Side(f"reuse {batch} x 8", "bench.ours.spec", (*common, "--reuse")),
            Side(f"plain {batch} x 8", "bench.ours.spec", tuple(common)),
        ]
        ours, peer = run_in_turn(sides, args.rounds)
        cases.append(compare(f"{batch} x 8", ours, peer))
        raw += [ours, peer]
    finish("spec", cases, headline=cases[:1], versions=raw[0].ready["versions"], only_json=only_json, raw=raw)


def compare(case: str, ours: Measured, peer: Measured) -> Case:
    """Compare both sides; `extra` has statistics of the drafts."""
    medians = {key: round(statistics.median(ours.values(key)), 5) for key in ("accepted", "tokens_per_pass", "kl")}
    sides = {"reuse": ours, "plain": peer}
    scores = {f"score_z_{name}": [round(z, 2) for z in side.values("score_z")] for name, side in sides.items()}
    speeds = ours.values("tokens_per_s"), peer.values("tokens_per_s")
    return Case(case, "plain sampling", "tokens/s", *speeds, higher_is_better=True, extra=medians | scores)


def warm_started(digits: int, steps: int) -> Path:
    """A folder with `model`, from the quickstart's first stage on longer sums; created if absent."""
    whole = yaml.safe_load(RUN_FILE.read_text())
    run = {key: whole[key] for key in ("model", "taskset")} | whole["stages"][0] | {"steps": steps}
    run.pop("evaluation", None)
    run["taskset"]["options"]["digits"] = digits
    run["model"]["new"]["context"] = 16 * (digits + 4)
    run["trainer"]["warmup_steps"] = min(run["trainer"]["warmup_steps"], steps)
    return checkpoint("spec", run, seed=0)
