"""Peak resident memory of a run of two GRPO steps on 0.6B parameters: types of weights and moments, LoRA, and QLoRA;
against TRL's, and against what `rollmill plan` predicts.

16 completions of 32 tokens, one thread, all in bf16. Ours is `rollmill run` from its first import to its checkpoint,
with the verification of the model at its first load. TRL is measured from its first import through two steps: with bf16
weights, whose updates it rounds to nearest, and with fp32 weights under autocast.
"""

from __future__ import annotations

import argparse

from bench.harness import Measured, Side, need, note, run_in_turn
from bench.ours.memory import WAYS
from bench.report import Case, finish

TRL_HOW = "pip install 'rollmill[bench]' (TRL 1.16)"
PEERS = {"fp32 weights": "float32", "bf16 weights": "bfloat16"}
NF4 = "nf4"
SIZE = ("--prompts", "4", "--group", "4", "--new-tokens", "32")


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench memory", description=__doc__)
    parser.add_argument("--model", default="m600")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    args = parser.parse_args(arguments)
    need("trl", TRL_HOW)
    if any(NF4 in way for way in args.ways):
        need("bitsandbytes", "pip install 'rollmill[quantization]'")
    model = ("--model", args.model)
    peers: dict[str, Measured] = {}
    for name, dtype in PEERS.items():  # one after the other, since they are large
        options = ("--dtype", "bf16", "--weights", dtype, "--micro-batch", "8")
        [peers[name]] = run_in_turn(
            [Side(f"trl, {name}", "bench.peers.trl_step", (*model, *SIZE, *options))], 1, warmups=0
        )
    cases, measured = [], list(peers.values())
    for way in args.ways:
        [one] = run_in_turn([Side(way, "bench.ours.memory", (*model, *SIZE, "--way", way))], 1, warmups=0)
        measured.append(one)
        peer = peers.get(way, peers["bf16 weights"])
        found = one.rounds[0]
        seconds = {"seconds": round(one.rounds[-1]["seconds"], 1), "peer_seconds": round(peer.rounds[-1]["seconds"], 1)}
        plan = {"predicted": round(found["predicted"], 2), "off_by": round(found["predicted"] / found["gib"] - 1, 3)}
        peak = max(peer.values("gib"))
        cases.append(Case(way, peer.name, "GiB", one.values("gib"), [peak], False, seconds | plan))
        note(f"  {way}: {found['gib']:.2f} GiB, predicted {found['predicted']:.2f}, a step in {found['seconds']:.1f} s")
        finish("memory", cases, versions={one.name: one.ready["versions"] for one in measured}, only_json=only_json,
               raw=measured, done=way == args.ways[-1])  # fmt: skip
