"""Milliseconds to sample one token for each of 64 rows over a vocabulary of 151,936: ours against torch.multinomial."""

from __future__ import annotations

import argparse

from bench.harness import Side, run_in_turn
from bench.report import Case, finish


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench sampling", description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    shape = ("--rows", str(args.rows), "--vocab", str(args.vocab))
    ours, peer = run_in_turn(
        [
            Side("ours", "bench.ours.sampling", shape),
            Side("torch.multinomial(softmax)", "bench.peers.torch_sampling", shape),
        ],
        args.rounds,
    )
    case = Case(f"{args.rows} x {args.vocab}", peer.name, "ms", ours.values("ms"), peer.values("ms"), False)
    versions = {"ours": ours.ready["versions"], peer.name: peer.ready["versions"]}
    finish("sampling", [case], versions=versions, only_json=only_json, raw=[ours, peer])
