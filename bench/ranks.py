"""Training tokens per second with one and two ranks on two cores: our trainer against torchrun and DDP.

Both make the same optimizer step (GRPO, fp32, AdamW) on the same 64 completions (8 prompts of 20 tokens x 8) of 64
tokens, with one thread in each process. The peer is a plain PyTorch loop over padded batches, with several settings in
turn; the fastest counts. Loss and norm of the gradient have to be the same on all sides.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence

from bench import machine
from bench.harness import BenchError, Measured, Side, note, run_in_turn
from bench.report import Case, best, finish

SHARDINGS = ("none", "fsdp", "tensor")
PASSES = (8, 32)
ROUNDS = {"tiny": 2, "m3": 5, "m25": 3}
TOLERANCE = 1e-3


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench ranks", description=__doc__)
    parser.add_argument("--models", default="m3,m25")
    parser.add_argument("--sharding", default=",".join(SHARDINGS), help="of our two ranks")
    parser.add_argument("--passes", type=int, nargs="+", default=PASSES, help="completions in a pass of the peer")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args(arguments)
    if len(machine.cores()) < 2:
        raise BenchError("two ranks need two cores, and this process may use one")
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.models.split(","):
        note(f"{name}:")
        shardings = args.sharding.split(",")
        measured = run_in_turn(sides(name, shardings, args.passes), args.rounds or ROUNDS[name], pinned=False)
        require_same(measured)
        cases += compare(name, measured, shardings)
        raw += measured
    headline = [case for case in cases if "2 ranks, none" in case.case] or cases
    versions = raw[0].ready["versions"]
    finish("ranks", cases, headline=headline, versions=versions, only_json=only_json, raw=raw)


def sides(model: str, shardings: Sequence[str], passes: Sequence[int]) -> list[Side]:
    """One rank, two ranks with every sharding, and the peer with one and two processes."""
    ours = [Side("1 rank", "bench.ours.ranks", ("--model", model))]
    ours += [
        Side(f"2 ranks, {sharding}", "bench.ours.ranks", ("--model", model, "--ranks", "2", "--sharding", sharding))
        for sharding in shardings
    ]
    return ours + [_peer(model, processes, size) for processes in (1, 2) for size in passes]


def _peer(model: str, processes: int, size: int) -> Side:
    return Side(
        f"DDP, {processes}, {size} a pass",
        "torch.distributed.run",
        (
            "--standalone",
            f"--nproc-per-node={processes}",
            "-m",
            "bench.peers.ddp_train_step",
            *("--model", model, "--micro-batch", str(size)),
        ),
        env={"OMP_NUM_THREADS": "1"},
    )


def compare(model: str, measured: Sequence[Measured], shardings: Sequence[str]) -> list[Case]:
    """Compare one rank with one process and two with two; and the speed-up from one to two on either side."""
    by_name = {each.name: each for each in measured}
    peers = {
        count: best([one for one in measured if one.name.startswith(f"DDP, {count},")], "tokens_per_s", True)
        for count in (1, 2)
    }
    speedup = _median(peers[2]) / _median(peers[1])
    found = []
    for name, peer in [("1 rank", peers[1]), *((f"2 ranks, {sharding}", peers[2]) for sharding in shardings)]:
        ours = by_name[name]
        extra = {"speedup": round(_median(ours) / _median(by_name["1 rank"]), 3), "peer_speedup": round(speedup, 3)}
        rates = ours.values("tokens_per_s"), peer.values("tokens_per_s")
        found.append(Case(f"{model}, {name}", peer.name, "tokens/s", *rates, higher_is_better=True, extra=extra))
    return found


def require_same(measured: Sequence[Measured]) -> None:
    """Raise if a side computed something else than the first one."""
    first = measured[0].rounds[0]
    for each in measured:
        for key in ("loss", "grad_norm"):
            if not math.isclose(each.rounds[0][key], first[key], rel_tol=TOLERANCE, abs_tol=1e-6):
                raise BenchError(f"{each.name} has {key} {each.rounds[0][key]}, and {measured[0].name} {first[key]}")


def _median(one: Measured) -> float:
    return statistics.median(one.values("tokens_per_s"))
