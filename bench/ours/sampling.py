"""Worker: the native engine's sampler on random logits."""

from __future__ import annotations

from bench.peers.torch_sampling import shape, timed
from bench.worker import Channel, serve, versions


def main() -> None:
    channel, (rows, vocab) = Channel(), shape()
    import torch

    from rollmill.engines.native.sampler import SamplingTensors, sample_tokens

    torch.set_num_threads(1)
    logits_BV = torch.randn(rows, vocab)
    params = SamplingTensors.of([(1.0, 1.0, 0, 0.0)] * rows, logits_BV.device)
    uniform_B = torch.rand(rows, dtype=torch.float64)
    serve(channel, lambda: timed(lambda: sample_tokens(logits_BV, params, uniform_B)), versions=versions("torch"))


if __name__ == "__main__":
    main()
