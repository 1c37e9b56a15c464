"""Worker under torchrun: one optimizer step per command by a plain PyTorch loop with DistributedDataParallel.

Every process takes its share of the completions, `--micro-batch` in a forward pass. Gradients are summed in the last
backward pass of a step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

from bench.models import SHAPES, model_dir
from bench.peers.rollouts import mean_id, rollouts
from bench.worker import Channel, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    channel = Channel()

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    policy: Any = AutoModelForCausalLM.from_pretrained(model_dir(args.model), dtype=torch.float32)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    prompt, vocab = 20, SHAPES[args.model].vocab_size
    groups = rollouts(vocab, [(prompt, [args.new_tokens] * args.group)] * args.prompts)
    ids_NL = torch.tensor([start + completion for start, some in groups for completion in some])
    rewards_PG = torch.tensor([[mean_id(completion) for completion in some] for _, some in groups], dtype=torch.float64)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    advantage_N = (centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-6)).flatten().float()
    count, mine = len(ids_NL), torch.arange(rank, len(ids_NL), size)

    def loss_of(part: Any) -> Any:
        """Sum of -ratio x advantage over the tokens, divided by the denominator of the whole batch."""
        logits = model(input_ids=ids_NL[part, :-1], use_cache=False).logits[:, prompt - 1 :]
        logprob = torch.log_softmax(logits, -1).gather(-1, ids_NL[part, prompt:, None])[..., 0]
        ratio = torch.exp(logprob - logprob.detach())
        return -(ratio * advantage_N[part, None]).sum() / (count * args.new_tokens)

    def step() -> dict[str, Any]:
        began, total = time.perf_counter(), torch.zeros(())
        optimizer.zero_grad(set_to_none=True)
        parts = mine.split(args.micro_batch)
        for number, part in enumerate(parts):
            with nullcontext() if number == len(parts) - 1 else model.no_sync():
                loss = loss_of(part) * size  # DDP takes the mean over the processes
                loss.backward()
            total += loss.detach() / size
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        seconds = time.perf_counter() - began
        dist.all_reduce(total)
        tokens = count * args.new_tokens
        return {"tokens_per_s": round(tokens / seconds, 1), "loss": total.item(), "grad_norm": float(norm)}

    if rank == 0:
        channel.say(versions=versions("torch", "transformers"))
    commands = channel.commands() if rank == 0 else iter(())
    while True:
        order = [next(commands, None) if rank == 0 else None]
        dist.broadcast_object_list(order)
        if order[0] is None:
            break
        report = step()
        if rank == 0:
            channel.say(**report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
