"""Seconds for one optimizer step (forward, backward, update; no rollout): our trainer against TRL's GRPOTrainer.

Both train on the same 64 completions (8 prompts of 20 tokens x 8) of 64 tokens with GRPO, one thread. TRL runs with
several settings in turn; the fastest counts.
"""

from __future__ import annotations

import argparse
import statistics

from bench.harness import Measured, Side, need, note, run_in_turn
from bench.models import SHAPES
from bench.report import Case, best, finish
from bench.roof import SIDE as ROOF
from bench.roof import Batch, training_seconds, with_share
from bench.step import TRL_HOW

#: Each type with 32 and with 8 completions per forward pass: which is fastest depends on the CPU.
TRL_SETTINGS = {
    f"{kind}, {size} a pass": ("--dtype", kind, "--micro-batch", str(size))
    for kind in ("fp32", "bf16")
    for size in (32, 8)
}
ROUNDS = {"tiny": 2, "m3": 5, "m25": 3}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench train_step", description=__doc__)
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
        sides = [Side("ours", "bench.ours.train_step", ("--model", name, "--dtype", args.dtype))]
        sides += [
            Side(f"trl {setting}", "bench.peers.trl_train_step", ("--model", name, *options))
            for setting, options in TRL_SETTINGS.items()
            if setting in args.trl
        ]
        *measured, roof = run_in_turn([*sides, ROOF], args.rounds or ROUNDS[name])
        least = training_seconds(SHAPES[name], Batch(), measured[0].ready["dtype"], roof)
        cases.append(with_share(compare(name, measured), least))
        raw += [*measured, roof]
    finish("train_step", cases, versions={one.name: one.ready["versions"] for one in raw}, only_json=only_json, raw=raw)


def compare(name: str, measured: list[Measured]) -> Case:
    """Compare ours with the fastest of the peer's settings."""
    ours, *peers = measured
    for key in ("tokens", "learned"):
        found = {one.rounds[0][key] for one in measured}
        assert len(found) == 1, f"the sides differ in {key}: {found}"
    fastest = best(peers, "seconds", higher_is_better=False)
    others = {peer.name: round(statistics.median(peer.values("seconds")), 4) for peer in peers}
    return Case(
        name,
        fastest.name,
        "s",
        ours.values("seconds"),
        fastest.values("seconds"),
        higher_is_better=False,
        extra={"dtype": ours.ready["dtype"], "peer_settings": others},
    )
