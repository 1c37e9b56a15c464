"""Worker: the same passes as `bench.ours.passes`, over batches padded to the longest experience.

Forward passes are plain transformers with an attention mask. Norms and log-probs are the trainer's, so that only the
padding differs.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

from bench.ours.passes import arguments, load, serve_passes
from bench.worker import Channel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a forward pass, padding included")
    args = arguments(parser)
    channel = Channel()
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from rollmill.trainer.logprobs import token_logprobs

    model: Any = load(args.model)
    head = model.get_output_embeddings()
    bf16 = torch.bfloat16 if args.dtype == "bf16" else None

    def padded(arrays: list[Any]) -> torch.Tensor:
        return pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)

    def once(batch: list[Any]) -> tuple[float, int]:
        ids_NL = padded([e.token_ids for e in batch]).long()
        actions_NL = padded([e.action_mask for e in batch])[:, 1:]
        real_NL = padded([torch.ones(len(e.token_ids) - 1).numpy() for e in batch]).long()
        count, length = actions_NL.shape
        total = 0.0
        for part in torch.arange(count).split(max(args.budget // length, 1)):
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                output = model.base_model(input_ids=ids_NL[part, :-1], attention_mask=real_NL[part], use_cache=False)
            rows_M = actions_NL[part].flatten().nonzero()[:, 0]
            target_M = ids_NL[part, 1:].flatten()[rows_M]
            hidden_Td = output.last_hidden_state.flatten(0, 1)
            ones_M = torch.ones(len(rows_M))
            logprob, _ = token_logprobs(hidden_Td, rows_M, head.weight, None, target_M, ones_M, dtype=bf16)
            loss = -logprob.sum() / int(actions_NL.sum())
            loss.backward()
            total += loss.item()
        return total, count * length

    serve_passes(channel, model, once, args)


if __name__ == "__main__":
    main()
