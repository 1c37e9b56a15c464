"""A pretrained model of 135M parameters learns to write bookings: what it reaches, and the cost of a step beside TRL.

Per seed, examples/real.yaml runs as with `rollmill run`; right bookings of its 200 held-out requests are counted before
it and after each stage (greedy). Then, unless `--trl` is given without a setting, ours and TRL make steps of its GRPO
stage on the model as it comes, with the same requests, reward, batch and learning rate, in turn on one core. TRL runs
with several settings; the fastest counts. The unit is seconds of the processor, which other programs on the machine
change less than the time on the wall.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import ROOT, BenchError, Side, need, note, run_in_turn
from bench.report import Case, best, finish
from bench.step import TRL_HOW
from bench.worker import versions

RUN_FILE = ROOT / "examples" / "real.yaml"
LEAST = 1 / 200  #: share of one held-out request, for ratios
#: bf16 autocast over fp32 weights, as ours computes, by completions per forward pass; and weights in bf16, which is
#: faster, but rounds most updates of this learning rate away.
TRL_SETTINGS = {
    "bf16, 64 a pass": ("--micro-batch", "64"),
    "bf16, 16 a pass": ("--micro-batch", "16"),
    "bf16 weights, 16 a pass": ("--micro-batch", "16", "--weights", "bf16"),
}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench real", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="of the complete runs; empty: none")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "bench-real", help="where the runs are; finished ones are kept"
    )
    parser.add_argument("--rounds", type=int, default=2, help="measured steps of each side")
    parser.add_argument("--warmups", type=int, default=1, help="steps before these")
    parser.add_argument("--trl", nargs="*", default=list(TRL_SETTINGS), choices=TRL_SETTINGS, help="settings of TRL")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run file"
    )
    args = parser.parse_args(arguments)
    if args.trl:
        need("trl", TRL_HOW)
    need("gguf", "pip install 'rollmill[gguf]'")
    learned = [learn(int(seed), args.runs, args.set) for seed in args.seeds.split(",") if seed]
    if not args.trl:
        if not learned:
            raise BenchError("nothing to do: give --seeds, or settings of --trl")
        accuracies = [list(one["accuracy"].values()) for one in learned]
        after, before = ([each[at] for each in accuracies] for at in (-1, -2))
        before = [max(share, LEAST) for share in before]
        case = Case("right bookings after GRPO", "after SFT", "share", after, before, True, {"learned": learned})
        finish("real_learn", [case], versions=versions("torch", "transformers", "gguf"), only_json=only_json)
        return
    changed = [part for setting in args.set for part in ("--set", setting)]
    sides = [Side("ours", "bench.ours.real", tuple(changed))]
    sides += [Side(f"trl {name}", "bench.peers.trl_real", (*TRL_SETTINGS[name], *changed)) for name in args.trl]
    measured = run_in_turn(sides, args.rounds, warmups=args.warmups, deadline_s=3600)
    ours, *peers = measured
    fastest = best(peers, "cpu_s", higher_is_better=False)
    extra = {
        "dtype": ours.ready["dtype"],
        "steps": {
            one.name: {key: [round(value, 3) for value in one.values(key)] for key in ("cpu_s", "seconds", "tokens")}
            for one in measured
        },
        "learned": learned,
    }
    case = Case(
        "processor seconds per GRPO step",
        fastest.name,
        "s",
        ours.values("cpu_s"),
        fastest.values("cpu_s"),
        higher_is_better=False,
        extra=extra,
    )
    found = {one.name: one.ready["versions"] for one in measured}
    finish("real", [case], versions=found, only_json=only_json, raw=measured)


def learn(seed: int, runs: Path, settings: list[str]) -> dict[str, Any]:
    """Run the file, unless it has run, and return what it reached and what it cost.

    Seconds are of the wall and of all processors, loading and both evaluations included.
    """
    folder = runs / f"seed-{seed}"
    costs = runs / f"seed-{seed}.json"
    if not costs.is_file():
        note(f"  running {RUN_FILE.name} with seed {seed}; see {folder}")
        command = [sys.executable, "-m", "rollmill", "run", str(RUN_FILE), "--out", str(folder)]
        before, began = _cpu_seconds(), time.perf_counter()
        changes = [part for setting in [*settings, f"seed={seed}"] for part in ("--set", setting)]
        done = subprocess.run(
            [*command, *changes], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise BenchError(f"the run with seed {seed} failed:\n{done.stderr[-2000:]}")
        spent = {"seconds": round(time.perf_counter() - began, 1), "cpu_s": round(_cpu_seconds() - before, 1)}
        costs.write_text(json.dumps(spent))
    summary = json.loads((folder / "summary.json").read_text())
    machine = json.loads((folder / "machine.json").read_text())
    return {
        "seed": seed,
        "steps": summary["steps"],
        "accuracy": {record["step"]: record["eval/greedy"] for record in summary["evaluations"]},
        **json.loads(costs.read_text()),
        "threads": machine["threads"],
        "precision": machine["precision"],
        "peak_rss_mb": summary["peak_rss_mb"],
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
