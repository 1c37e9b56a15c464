"""Rows of 32,768 tokens: memory and speed of a training step on one rank and on two that share the row (`context`).

A GRPO step (fp32, gradient checkpointing, one thread in each process) on two shapes of a row: a group of four
completions of 64 tokens after one long prompt, and one long completion. The peer is one rank; loss and norm of the
gradient have to be the same. Memory is the largest of any rank's, above what it held before the step (weights and
optimizer states). Then the engine's prefill of that prompt in pieces, against transformers' own forward pass with a
cache, in the same way.

At the end it prints what more ranks would take: activations / R, and the bytes that each rank sends.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence

from bench import machine
from bench.harness import BenchError, Measured, Side, note, run_in_turn
from bench.models import SHAPES
from bench.report import Case, finish

KINDS = ("prompt", "completion")
RANKS = (1, 2)
TOLERANCE = 1e-3
DEADLINE_S = 7200


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench context", description=__doc__)
    parser.add_argument("--models", default="m3")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args(arguments)
    if len(machine.cores()) < max(RANKS):
        raise BenchError("two ranks need two cores, and this process may use one")
    cases: list[Case] = []
    raw: list[Measured] = []
    for model in args.models.split(","):
        for kind in args.kinds:
            note(f"{model}, one {kind} of {args.tokens} tokens:")
            measured = [_measured(model, args.tokens, kind, ranks, args.rounds) for ranks in RANKS]
            require_same(measured)
            cases += compare(f"{model}, {kind} of {args.tokens} tokens", *measured)
            raw += measured
        note(f"{model}, prefill of {args.tokens} tokens:")
        prefills = [_prefilled(model, args.tokens, side, args.rounds) for side in ("engine", "transformers")]
        cases += compare_prefill(f"{model}, prefill of {args.tokens} tokens", model, args.tokens, *prefills)
        raw += prefills
        print_scaling(model, args.tokens, cases)
    headline = [case for case in cases if case.unit == "GiB" and "2 ranks" in case.case]
    finish("context", cases, headline=headline, versions=raw[0].ready["versions"], only_json=only_json, raw=raw)


def _measured(model: str, tokens: int, kind: str, ranks: int, rounds: int) -> Measured:
    """One after the other, since the rows are large; a step on a short row comes before `ready`."""
    options = ("--model", model, "--tokens", str(tokens), "--kind", kind, "--ranks", str(ranks))
    side = Side(f"{ranks} rank{'s' * (ranks > 1)}", "bench.ours.context", options)
    return run_in_turn([side], rounds, warmups=0, pinned=False, deadline_s=DEADLINE_S)[0]


def _prefilled(model: str, tokens: int, side: str, rounds: int) -> Measured:
    options = ("--model", model, "--tokens", str(tokens), "--kind", "prefill", "--side", side)
    return run_in_turn([Side(side, "bench.ours.context", options)], rounds, warmups=0, deadline_s=DEADLINE_S)[0]


def compare(name: str, one: Measured, two: Measured) -> list[Case]:
    """Compare two ranks with one: tokens per second, and memory."""
    rest = {"held_gib": round(max(two.values("held_gib")), 3), "peer_held_gib": round(max(one.values("held_gib")), 3)}
    return [
        Case(f"{name}, 2 ranks", one.name, "tokens/s", two.values("tokens_per_s"), one.values("tokens_per_s"), True),
        Case(f"{name}, 2 ranks", one.name, "GiB", two.values("work_gib"), one.values("work_gib"), False, rest),
    ]


def compare_prefill(name: str, model: str, tokens: int, engine: Measured, peer: Measured) -> list[Case]:
    """Compare the engine with transformers: memory beside the keys and values themselves, and seconds."""
    extra = {
        "cache_gib": round(engine.rounds[0]["cache_gib"], 4),
        "keys_and_values_gib": round(cache_gib(model, tokens), 4),
    }
    return [
        Case(name, peer.name, "GiB", engine.values("work_gib"), peer.values("work_gib"), False, extra),
        Case(name, peer.name, "tokens/s", engine.values("tokens_per_s"), peer.values("tokens_per_s"), True),
    ]


def cache_gib(model: str, tokens: int) -> float:
    """Keys and values of a sequence in fp32."""
    shape = SHAPES[model]
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 4 * tokens / 2**30


def sent_gib(model: str, tokens: int, ranks: int) -> float:
    """Queries, keys, values and outputs that each of `ranks` sends in a step in fp32, with checkpointing: forward,
    recomputed and backward."""
    shape = SHAPES[model]
    kv_heads = math.lcm(shape.num_key_value_heads, ranks)
    numbers = (2 * shape.num_attention_heads + 2 * kv_heads) * shape.head_dim
    return 3 * shape.num_hidden_layers * tokens * numbers * 4 * (ranks - 1) / ranks**2 / 2**30


def print_scaling(model: str, tokens: int, cases: Sequence[Case]) -> None:
    """Print the memory and the traffic of more ranks, from the peer's memory on one."""
    work = max(statistics.median(case.peer) for case in cases if case.unit == "GiB" and "2 ranks" in case.case)
    for ranks in (2, 4, 8):
        if SHAPES[model].num_attention_heads % ranks == 0:
            own, sent = work / ranks, sent_gib(model, tokens, ranks)
            note(f"  {ranks} ranks: {work:.2f} / {ranks} = {own:.2f} GiB, and each sends {sent:.2f} GiB in a step")


def require_same(measured: Sequence[Measured]) -> None:
    """Raise if a side computed something else than the first one."""
    first = measured[0].rounds[0]
    for each in measured:
        for key in ("loss", "grad_norm"):
            if not math.isclose(each.rounds[0][key], first[key], rel_tol=TOLERANCE, abs_tol=1e-5):
                raise BenchError(f"{each.name} has {key} {each.rounds[0][key]}, and {measured[0].name} {first[key]}")
