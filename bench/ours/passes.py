"""Worker: the trainer's forward and backward pass over synthetic experiences, as packed rows.

The loss is the mean negative log-prob of the completions' tokens, which does not depend on the packing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from bench.models import SHAPES, model_dir
from bench.peers.memory import resident, with_peak
from bench.peers.rollouts import Groups, parse_groups, rollouts
from bench.worker import Channel, serve, versions

BUDGET = 8192  # the trainer's default of micro_batch_tokens
SHORT: Groups = [(8, [4, 4])]  # run before memory is measured, to load libraries and weights


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line of a worker with passes over experiences."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--groups", required=True, type=parse_groups, help="JSON: [[prompt, [completion, ...]], ...]")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast over fp32 weights")
    return parser.parse_args()


def load(model: str) -> Any:
    """Load the benchmark model with fp32 weights, on one thread."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_dir(model), dtype=torch.float32).eval()


def serve_passes(channel: Channel, model: Any, once: Callable[[list[Any]], tuple[float, int]], args: Any) -> None:
    """Serve `once(experiences) -> (loss, tokens of all rows)`: seconds, and peak memory above the model."""
    from bench.ours.experiences import experiences
    from rollmill.models.cpu.norms import find_norms, use_fast_norms

    norms, vocab = find_norms(model), SHAPES[args.model].vocab_size
    short, batch = (experiences(rollouts(vocab, groups), vocab) for groups in (SHORT, args.groups))

    def run() -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        began, cpu = time.perf_counter(), time.process_time()
        with use_fast_norms(norms):
            (loss, tokens), peak = with_peak(lambda: once(batch))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
        peak_mib = (peak - model_only) / 2**20
        return {
            "seconds": seconds, "cpu_s": cpu_s, "tokens": tokens, "peak_mib": peak_mib, "loss": loss, "grad_norm": norm
        }  # fmt: skip

    with use_fast_norms(norms):
        once(short)
    model.zero_grad(set_to_none=True)
    model_only = resident()
    serve(channel, run, dtype=args.dtype, versions=versions("torch", "transformers"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--unshared", action="store_true", help="compute a common prefix once for each completion")
    args = arguments(parser)
    channel = Channel()
    import torch

    from rollmill.trainer.batch import build_micro_batches, build_token_table
    from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention

    model, device = load(args.model), torch.device("cpu")

    def once(batch: list[Any]) -> tuple[float, int]:
        table = build_token_table(batch, device)
        micros = build_micro_batches(batch, table, range(len(batch)), BUDGET, device, share_prefixes=not args.unshared)
        total = 0.0
        for micro in micros:
            with use_packed_attention(model, micro):
                logprob, _ = compute_logprobs(model, micro, table, bf16=args.dtype == "bf16")
                loss = -logprob.sum() / len(table.target)
                loss.backward()
            total += loss.item()
        return total, sum(micro.input_ids.numel() for micro in micros)

    serve_passes(channel, model, once, args)


if __name__ == "__main__":
    main()
