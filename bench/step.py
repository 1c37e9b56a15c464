"""Seconds for one full GRPO step (rollout, reward, update): ours against TRL's GRPOTrainer.

64 completions (8 prompts x 8) of 64 tokens, one thread. TRL runs with several settings in turn; the fastest counts.
"""

from __future__ import annotations

import argparse
import statistics

from bench.harness import Measured, Side, need, note, run_in_turn
from bench.models import SHAPES
from bench.report import Case, best, finish
from bench.roof import SIDE as ROOF
from bench.roof import Batch, rollout_seconds, training_seconds, with_share

TRL_HOW = "pip install 'rollmill[bench]' (TRL 1.16)"
#: TRL's settings that were fastest on some CPU: fp32 in two micro-batches, with a dynamic or a static cache, and bf16.
TRL_SETTINGS = {
    "fp32": ("--dtype", "fp32", "--micro-batch", "32"),
    "fp32 static cache": ("--dtype", "fp32", "--micro-batch", "32", "--cache", "static"),
    "bf16": ("--dtype", "bf16", "--micro-batch", "32"),
}
ROUNDS = {"tiny": 2, "m3": 5, "m25": 3}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench step", description=__doc__)
    parser.add_argument("--models", default="m3,m25")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"), help="ours")
    parser.add_argument("--trl", nargs="+", default=list(TRL_SETTINGS), choices=TRL_SETTINGS, help="settings of TRL")
    args = parser.parse_args(arguments)
    need("trl", TRL_HOW)
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.models.split(","):
        note(f"{name}:")
        sides = [Side("ours", "bench.ours.step", ("--model", name, "--dtype", args.dtype))]
        sides += [
            Side(f"trl {setting}", "bench.peers.trl_step", ("--model", name, *options))
            for setting, options in TRL_SETTINGS.items()
            if setting in args.trl
        ]
        *measured, roof = run_in_turn([*sides, ROOF], args.rounds or ROUNDS[name])
        given = (SHAPES[name], Batch(), measured[0].ready["dtype"], roof)
        cases.append(with_share(compare(name, measured), rollout_seconds(*given)[0] + training_seconds(*given)))
        raw += [*measured, roof]
    finish("step", cases, versions={one.name: one.ready["versions"] for one in raw}, only_json=only_json, raw=raw)


def compare(name: str, measured: list[Measured]) -> Case:
    """Compare ours with the fastest of the peer's settings."""
    ours, *peers = measured
    tokens = {one.rounds[0]["tokens"] for one in measured}
    assert len(tokens) == 1, f"the sides produced different numbers of tokens: {tokens}"
    fastest = best(peers, "seconds", higher_is_better=False)
    phases = {
        key: round(statistics.median(round_["phases"][key] for round_ in ours.rounds), 4)
        for key in ours.rounds[0]["phases"]
    }
    others = {peer.name: round(statistics.median(peer.values("seconds")), 4) for peer in peers}
    return Case(
        name,
        fastest.name,
        "s",
        ours.values("seconds"),
        fastest.values("seconds"),
        higher_is_better=False,
        extra={"dtype": ours.ready["dtype"], "phases": phases, "peer_settings": others},
    )
