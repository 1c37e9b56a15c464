"""Worker: the trainer's log-probs in chunks of the default size, and their backward pass."""

from __future__ import annotations

from bench.peers.torch_logprob import serve_logprobs, shape
from bench.worker import Channel


def main() -> None:
    channel, (tokens, vocab, hidden) = Channel(), shape()
    import torch

    from rollmill.trainer.logprobs import token_logprobs

    def logprobs(hidden_Td: torch.Tensor, weight_Vd: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        rows_T, ones_T = torch.arange(len(hidden_Td)), torch.ones(len(hidden_Td))
        return token_logprobs(hidden_Td, rows_T, weight_Vd, None, target_T, ones_T)[0]

    serve_logprobs(channel, tokens, vocab, hidden, logprobs)


if __name__ == "__main__":
    main()
