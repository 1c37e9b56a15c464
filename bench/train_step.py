"""Seconds for one optimizer step (forward, backward, update; no rollout): our trainer against TRL's GRPOTrainer.

Both train on the same 64 completions (8 prompts of 20 tokens x 8) of 64 tokens with GRPO, one thread; or, where longer
completions are asked for, on those of fewer prompts. TRL runs with several settings in turn; the fastest counts.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

from bench.harness import BenchError, Measured, Side, need, note, run_in_turn
from bench.models import SHAPES
from bench.report import Case, best, finish
from bench.roof import SIDE as ROOF
from bench.roof import Batch, training_seconds, with_share
from bench.step import TRL_HOW

#: Each type with 32, 8 and 2 completions per forward pass: which is fastest depends on the CPU and on their length.
TRL_SETTINGS = {f"{kind}, {size} a pass": (kind, size) for kind in ("fp32", "bf16") for size in (32, 8, 2)}
ROUNDS = {"tiny": 2, "m3": 5, "m25": 3}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench train_step", description=__doc__)
    parser.add_argument("--models", default="m3,m25")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64], help="tokens of a completion")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"), help="ours")
    parser.add_argument("--trl", nargs="+", default=list(TRL_SETTINGS), choices=TRL_SETTINGS, help="settings of TRL")
    args = parser.parse_args(arguments)
    need("trl", TRL_HOW)
    cases: list[Case] = []
    raw: list[Measured] = []
    for name, new_tokens in itertools.product(args.models.split(","), args.new_tokens):
        batch = Batch(prompts=max(512 // new_tokens, 1), new_tokens=new_tokens)
        case = name if new_tokens == 64 else f"{name}, {new_tokens} tokens"
        note(f"{case}:")
        common = ("--model", name, "--prompts", str(batch.prompts), "--new-tokens", str(new_tokens))
        sides = [Side("ours", "bench.ours.train_step", (*common, "--dtype", args.dtype))]
        for setting in args.trl:
            kind, size = TRL_SETTINGS[setting]
            if size in ((32, 8) if new_tokens == 64 else (8, 2)):
                options = (*common, "--dtype", kind, "--micro-batch", str(size))
                sides.append(Side(f"trl {setting}", "bench.peers.trl_train_step", options))
        if len(sides) == 1:
            raise BenchError(f"{case}: none of {args.trl} is for completions of this length; see TRL_SETTINGS")
        *measured, roof = run_in_turn([*sides, ROOF], args.rounds or ROUNDS[name])
        found = compare(case, measured)
        if new_tokens == 64:  # the roof counts no attention, which takes much of a long completion's time
            found = with_share(found, training_seconds(SHAPES[name], batch, measured[0].ready["dtype"], roof))
        cases.append(found)
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
