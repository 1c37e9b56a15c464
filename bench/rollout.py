"""Tokens per second of rollouts: the native engine against vLLM's CPU build and transformers' generate.

32 prompts of 20 tokens x 8 completions of 128 tokens (0.6B: 8 x 8 of 64), temperature 1, no completion ends early.
vLLM runs in bf16 and fp32; the headline ratio is against bf16, `ratio_vs_best` against the faster of the two.
transformers runs with its fastest type and batch size, which the worker measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from bench import models
from bench.harness import Measured, Side, note, run_in_turn, vllm_python
from bench.report import Case, best, finish
from bench.roof import SIDE as ROOF
from bench.roof import Batch, rollout_seconds, share

#: model -> (prompts, completions of each, new tokens, whether to run transformers, rounds)
CASES = {
    "tiny": (4, 4, 16, True, 2),
    "m3": (32, 8, 128, True, 5),
    "m25": (32, 8, 128, True, 3),
    "m600": (8, 8, 64, False, 2),
}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench rollout", description=__doc__)
    parser.add_argument("--models", default="m3,m25,m600")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"), help="ours")
    parser.add_argument("--without", default="", help="peers to leave out: vllm, hf")
    args = parser.parse_args(arguments)
    left_out = set(args.without.split(",")) - {""}
    python = "" if "vllm" in left_out else vllm_python()
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.models.split(","):
        note(f"{name}:")
        contestants = [*sides(name, args.dtype, python, left_out), ROOF]
        *measured, roof = run_in_turn(contestants, args.rounds or CASES[name][-1])
        count, group, new_tokens, _, _ = CASES[name]
        batch = Batch(count, models.PROMPT, group, new_tokens)
        least, bound = rollout_seconds(models.SHAPES[name], batch, measured[0].ready["dtype"], roof)
        seconds = measured[0].values("seconds")
        note(f"  share of the roof ({bound}): {share(least, seconds):.0%}")
        for case in compare(name, measured):
            case.extra |= {"share_of_roof": share(least, seconds), "bound": bound}
            cases.append(case)
        raw += [*measured, roof]
    finish(
        "rollout",
        cases,
        headline=[case for case in cases if case.peer_name == "vllm bfloat16"] or cases,
        versions={one.name: one.ready["versions"] for one in raw},
        only_json=only_json,
        raw=raw,
    )


def sides(name: str, dtype: str, python: str, left_out: set[str], device: str = "cpu") -> list[Side]:
    """The contestants for one model."""
    count, group, new_tokens, with_transformers, _ = CASES[name]
    folder = str(models.model_dir(name))
    common = (
        *("--model", folder, "--prompts", json.dumps(models.prompts(name, count, models.PROMPT))),
        *("--group", str(group), "--new-tokens", str(new_tokens)),
    )
    chosen = [Side("ours", "bench.ours.rollout", (*common, "--dtype", dtype, "--device", device))]
    if "vllm" not in left_out:
        for kind in ("bfloat16", "float32"):
            chosen.append(Side(f"vllm {kind}", "bench.peers.vllm_rollout", (*common, "--dtype", kind), python))
    if "hf" not in left_out and (with_transformers or device != "cpu"):
        chosen.append(Side("transformers", "bench.peers.hf_rollout", (*common, "--device", device)))
    return chosen


def compare(name: str, measured: list[Measured]) -> list[Case]:
    """Compare ours with each peer that ran."""
    ours, *peers = measured
    assert len({one.rounds[0]["tokens"] for one in measured}) == 1, "the sides produced different numbers of tokens"
    rates = ours.values("tokens_per_s")
    extra: dict[str, Any] = {
        "startup_s": round(ours.ready["startup_s"], 3),
        "first_completion_s": round(statistics.median(ours.values("first_completion_s")), 3),
        "dtype": ours.ready["dtype"],
    }
    cases = [
        Case(name, peer.name, "tokens/s", rates, peer.values("tokens_per_s"), True,
             {**extra, "peer_startup_s": round(peer.ready["startup_s"], 3)})
        for peer in peers
    ]  # fmt: skip
    engines = [peer for peer in peers if peer.name.startswith("vllm")]
    if engines:
        fastest = best(engines, "tokens_per_s", higher_is_better=True)
        ratio = statistics.median(rates) / statistics.median(fastest.values("tokens_per_s"))
        for case in cases:
            if case.peer_name.startswith("vllm"):
                case.extra["ratio_vs_best"] = round(ratio, 3)
    return cases
