"""Worker: one batch of completions per command with transformers' generate, at its best type and batch size."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from bench.worker import Channel, serve, versions

#: Batch sizes of generate that are tried, with a quarter of the tokens, to find the fastest.
BATCHES = (32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--prompts", required=True, help="JSON: token ids of every prompt")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    channel = Channel()

    import torch
    from transformers import AutoModelForCausalLM

    if args.device == "cpu":
        torch.set_num_threads(1)
    began = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model).to(args.device).eval()
    startup_s = time.perf_counter() - began
    prompts_BT = torch.tensor(json.loads(args.prompts), device=args.device).repeat_interleave(args.group, 0)

    def generate(batch: int, new_tokens: int, prompts_BT: torch.Tensor) -> dict[str, Any]:
        began, tokens = time.perf_counter(), 0
        for part_BT in prompts_BT.split(batch):
            out_BT = model.generate(
                input_ids=part_BT,
                attention_mask=torch.ones_like(part_BT),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
            )
            tokens += (out_BT.shape[1] - part_BT.shape[1]) * out_BT.shape[0]
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}

    dtypes = (torch.bfloat16,) if args.device == "cuda" else (torch.float32, torch.bfloat16)
    trials = []
    for dtype in dtypes:
        model.to(dtype)
        for batch in sorted({min(size, len(prompts_BT)) for size in BATCHES}):
            rate = generate(batch, args.new_tokens // 4, prompts_BT[:batch])["tokens_per_s"]
            trials.append((rate, str(dtype).removeprefix("torch."), batch))
    _, dtype_name, batch = max(trials)
    model.to(getattr(torch, dtype_name))
    serve(
        channel,
        lambda: generate(batch, args.new_tokens, prompts_BT),
        startup_s=startup_s,
        dtype=dtype_name,
        batch=batch,
        versions=versions("torch", "transformers"),
    )


if __name__ == "__main__":
    main()
