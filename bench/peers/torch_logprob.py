"""Worker: log-probs from the full matrix of logits: log_softmax, gather, backward."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from bench.peers.memory import resident, with_peak
from bench.worker import Channel, serve, versions


def shape() -> tuple[int, int, int]:
    """Tokens, vocabulary and hidden size, from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    args = parser.parse_args()
    return args.tokens, args.vocab, args.hidden


def serve_logprobs(channel: Channel, tokens: int, vocab: int, hidden: int, logprobs: Callable[..., Any]) -> None:
    """Serve `logprobs(hidden_Td, weight_Vd, target_T)` and its backward pass: peak memory above the inputs, seconds."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_Td = torch.randn(tokens, hidden, requires_grad=True)
    weight_Vd = torch.randn(vocab, hidden).mul_(hidden**-0.5).requires_grad_()
    target_T = torch.randint(vocab, (tokens,))

    def once(count: int) -> float:
        """Mean negative log-prob of the first `count` tokens, with gradients."""
        hidden_Td.grad = weight_Vd.grad = None
        loss = -logprobs(hidden_Td[:count], weight_Vd, target_T[:count]).mean()
        loss.backward()
        return float(loss)

    def run() -> dict[str, Any]:
        began, cpu = time.perf_counter(), time.process_time()
        loss, peak = with_peak(lambda: once(tokens))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        assert hidden_Td.grad is not None
        assert weight_Vd.grad is not None
        norm = float(hidden_Td.grad.norm().hypot(weight_Vd.grad.norm()))
        hidden_Td.grad = weight_Vd.grad = None
        peak_mib = (peak - inputs_only) / 2**20
        return {"peak_mib": peak_mib, "seconds": seconds, "cpu_s": cpu_s, "loss": loss, "grad_norm": norm}

    once(1)  # loads the libraries
    hidden_Td.grad = weight_Vd.grad = None
    inputs_only = resident()
    serve(channel, run, versions=versions("torch"))


def main() -> None:
    channel, (tokens, vocab, hidden) = Channel(), shape()
    import torch

    def logprobs(hidden_Td: torch.Tensor, weight_Vd: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        logprobs_TV = torch.log_softmax(hidden_Td @ weight_Vd.T, -1)
        return logprobs_TV.gather(1, target_T[:, None])[:, 0]

    serve_logprobs(channel, tokens, vocab, hidden, logprobs)


if __name__ == "__main__":
    main()
