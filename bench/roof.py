"""Share of the machine's roof that rollouts and training reach, on one core.

The roof is measured in the same run, in turn with ours: the fastest matrix product of each type, and reading memory. A
decode pass takes at least as long as its products at that rate, or as reading its weights, keys, values and logits
once, whichever is longer. A training step takes at least its products. Attention and everything between the products is
not counted. Weights of small models stay in caches, which are read faster than the measured gigabyte.

Rollouts: 64 completions of 64 tokens after 8 prompts of 20 tokens. Training: one optimizer step on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass

from bench.harness import Measured, Side, note, run_in_turn
from bench.models import SHAPES, Shape, model_dir, prompts
from bench.report import Case, finish

SIDE = Side("roof", "bench.ours.roof")
ROUNDS = {"tiny": 1, "m3": 3, "m25": 3, "m135": 2, "m600": 1}
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Batch:
    """Completions of equal length: `group` for each of `prompts` prompts."""

    prompts: int = 8
    prompt: int = 20
    group: int = 8
    new_tokens: int = 64

    @property
    def completions(self) -> int:
        """Number of completions."""
        return self.prompts * self.group


def weights(shape: Shape) -> tuple[int, int]:
    """Weights that each token is multiplied with: those of all layers, and those of the output layer."""
    heads = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
    return shape.num_hidden_layers * layer, shape.vocab_size * shape.hidden_size


def decode_bytes(shape: Shape, batch: Batch, dtype: str) -> list[int]:
    """Bytes that each decode pass of a rollout reads: weights, keys and values, and logits, each once."""
    size = _BYTES[dtype]
    layers, head = weights(shape)
    kept = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * size  # keys and values of a token
    each = size * (layers + head + batch.completions * shape.vocab_size)
    prompts = batch.prompts * batch.prompt
    return [each + kept * (prompts + batch.completions * generated) for generated in range(1, batch.new_tokens)]


def rollout_seconds(shape: Shape, batch: Batch, dtype: str, roof: Measured) -> tuple[float, str]:
    """Least seconds of a rollout, and what bounds most of its passes: `products` or `memory`."""
    rate, reading = (1e9 * statistics.median(roof.values(key)) for key in (dtype, "read_gb_s"))
    layers, head = weights(shape)
    products = 2 * batch.completions * (layers + head) / rate
    seconds = 2 * batch.prompts * (batch.prompt * layers + head) / rate
    by_products = 0
    for read in decode_bytes(shape, batch, dtype):
        memory = read / reading
        seconds += max(products, memory)
        by_products += products > memory
    return seconds, "products" if 2 * by_products >= batch.new_tokens else "memory"


def training_operations(shape: Shape, batch: Batch) -> int:
    """Operations of the products of forward and backward pass, with each prompt once; nothing is computed again."""
    layers, head = weights(shape)
    actions = batch.completions * batch.new_tokens
    return 3 * 2 * ((batch.prompts * batch.prompt + actions) * layers + actions * head)


def training_seconds(shape: Shape, batch: Batch, dtype: str, roof: Measured) -> float:
    """Least seconds of forward and backward pass."""
    return training_operations(shape, batch) / (1e9 * statistics.median(roof.values(dtype)))


def share(least_seconds: float, seconds: list[float]) -> float:
    """Share of the roof that a measured time reaches."""
    return round(least_seconds / statistics.median(seconds), 3)


def with_share(case: Case, least_seconds: float) -> Case:
    """Add the share of the roof that our side of a case in seconds reaches."""
    case.extra["share_of_roof"] = share(least_seconds, case.ours)
    note(f"  share of the roof: {case.extra['share_of_roof']:.0%}")
    return case


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench roof", description=__doc__)
    parser.add_argument("--models", default="m3,m25,m135,m600")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"))
    args = parser.parse_args(arguments)
    cases: list[Case] = []
    raw: list[Measured] = []
    for name in args.models.split(","):
        note(f"{name}:")
        measured = run_in_turn([SIDE, *_sides(name, args.dtype)], args.rounds or ROUNDS[name])
        found = _compare(name, *measured)
        note("".join(f"  {case.case}: {case.extra['share']:.0%} of the roof\n" for case in found).rstrip())
        cases += found
        raw += measured
    finish("roof", cases, versions={one.name: one.ready["versions"] for one in raw}, only_json=only_json, raw=raw)


def _sides(name: str, dtype: str) -> list[Side]:
    batch = Batch()
    common = ("--dtype", dtype, "--group", str(batch.group), "--new-tokens", str(batch.new_tokens))
    given = ("--model", str(model_dir(name)), "--prompts", json.dumps(prompts(name, batch.prompts, batch.prompt)))
    return [
        Side("rollout", "bench.ours.rollout", (*given, *common)),
        Side("train", "bench.ours.train_step", ("--model", name, "--prompts", str(batch.prompts), *common)),
    ]


def _compare(name: str, roof: Measured, rollout: Measured, train: Measured) -> list[Case]:
    shape, batch = SHAPES[name], Batch()
    rolled, bound = rollout_seconds(shape, batch, rollout.ready["dtype"], roof)
    trained = training_seconds(shape, batch, train.ready["dtype"], roof)
    found = []
    for phase, least, one, by in (("rollout", rolled, rollout, bound), ("train", trained, train, "products")):
        seconds = one.values("seconds")
        extra = {"share": share(least, seconds), "bound": by, "dtype": one.ready["dtype"]}
        found.append(Case(f"{name} {phase}", f"roof ({by})", "s", seconds, [least] * len(seconds), False, extra))
    return found
