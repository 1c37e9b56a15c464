"""Processor seconds for one full GRPO step on pictures: ours against TRL's GRPOTrainer, and against one tower pass per
completion; and tokens per processor second of rollouts alone, against vLLM's CPU build.

64 completions (8 prompts x 8) of 64 tokens, one thread; a prompt has a picture of 64 tokens and 20 words. The model is
a LLaVA with random weights and a frozen tower. TRL runs with several settings in turn; the fastest counts.

Rollouts alone are those of an Idefics3, since vLLM's LLaVA needs torchvision; vLLM runs in bf16 and fp32, and the
faster one counts. Every batch has new pictures, so that neither side finds them in a cache: each decodes, scales and
encodes a picture once per batch. Within a batch, both sides share a group's features, keys and values of the prompt.

`--learn` measures instead what examples/see.yaml learns, and writes see_learn.json: `bench/see_learn.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.harness import ROOT, Measured, Side, need, note, run_in_turn, vllm_python
from bench.report import Case, best, finish
from bench.see_learn import learn
from bench.step import TRL_HOW, TRL_SETTINGS


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench see", description=__doc__)
    parser.add_argument("--models", default="m3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"), help="ours")
    parser.add_argument("--trl", nargs="+", default=["fp32", "bf16"], choices=TRL_SETTINGS, help="settings of TRL")
    parser.add_argument("--without", default="", help="peers to leave out: trl (whole steps), vllm (rollouts)")
    parser.add_argument("--learn", action="store_true", help="run examples/see.yaml, and measure nothing else")
    parser.add_argument("--seeds", default="0,1,2", help="of --learn")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs" / "bench-see",
        help="of --learn: where the runs are; finished ones are kept",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of --learn: override a key")
    args = parser.parse_args(arguments)
    if args.learn:
        seeds = [int(seed) for seed in args.seeds.split(",")]
        return learn(seeds, args.runs.absolute(), args.set, only_json)
    left_out = set(args.without.split(",")) - {""}
    if "trl" not in left_out:
        need("trl", TRL_HOW)
    python = "" if "vllm" in left_out else vllm_python()
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.models.split(","):
        note(f"{name}:")
        own = ("--model", name, "--dtype", args.dtype)
        if "trl" not in left_out:
            measured = run_in_turn(step_sides(own, args.trl), args.rounds)
            cases += compare(name, measured)
            raw += measured
        if "vllm" not in left_out:
            measured = run_in_turn(rollout_sides(own, python), args.rounds)
            cases.append(compare_rollouts(name, measured))
            raw += measured
    versions = {one.name: one.ready["versions"] for one in raw}
    finish("see", cases, headline=cases[:1], versions=versions, only_json=only_json, raw=raw)


def step_sides(own: tuple[str, ...], settings: Sequence[str]) -> list[Side]:
    """The contestants of whole steps; `own` are arguments of ours, and begin with the model."""
    sides = [Side("ours", "bench.ours.see", own)]
    sides += [Side("tower per completion", "bench.ours.see", (*own, "--tower", "completion"))]
    return sides + [
        Side(f"trl {setting}", "bench.peers.trl_see", (*own[:2], *TRL_SETTINGS[setting])) for setting in settings
    ]


def rollout_sides(own: tuple[str, ...], python: str) -> list[Side]:
    """The contestants of rollouts alone."""
    sides = [Side("ours, rollouts", "bench.ours.see_rollout", own)]
    return sides + [
        Side(f"vllm {dtype}", "bench.peers.vllm_see_rollout", (*own[:2], "--dtype", dtype), python)
        for dtype in ("bfloat16", "float32")
    ]


def compare_rollouts(name: str, measured: list[Measured]) -> Case:
    """Compare our rollouts with the faster of vLLM's types."""
    ours, *peers = measured
    for key in ("tokens", "prompt_tokens"):
        sizes = {one.rounds[0][key] for one in measured}
        assert len(sizes) == 1, f"the sides had different numbers of {key}: {sizes}"
    fastest = best(peers, "rate", higher_is_better=True)
    unit = "tokens per processor second"
    extra = {
        "dtype": ours.ready["dtype"],
        "seconds": round(statistics.median(ours.values("seconds")), 3),
        "peer_seconds": round(statistics.median(fastest.values("seconds")), 3),
    }
    return Case(f"{name} rollout", fastest.name, unit, ours.values("rate"), fastest.values("rate"), True, extra)


def compare(name: str, measured: list[Measured]) -> list[Case]:
    """Compare ours with the fastest of TRL's settings, and with the tower run once per completion."""
    ours, repeated, *peers = measured
    tokens = {one.rounds[0]["tokens"] for one in measured}
    assert len(tokens) == 1, f"the sides produced different numbers of tokens: {tokens}"
    fastest = best(peers, "cpu_s", higher_is_better=False)
    return [
        Case(
            f"{name}{case}",
            peer.name,
            "s",
            ours.values("cpu_s"),
            peer.values("cpu_s"),
            higher_is_better=False,
            extra={"dtype": ours.ready["dtype"]},
        )
        for case, peer in (("", fastest), (" tower", repeated))
    ]
