"""Worker: a run of two GRPO steps per command, as `rollmill run` makes it, and the peak of its resident memory."""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

from bench.models import PROMPT, model_dir
from bench.worker import Channel, serve, versions

_BF16 = {"precision": "bf16", "param_dtype": "bf16"}
_ADAPTERS = {"rank": 16, "merge": False}
WAYS: dict[str, dict[str, Any]] = {
    "fp32 weights": {"trainer": {"precision": "bf16"}},
    "bf16 weights": {"trainer": _BF16},
    "bf16 weights, AdamW in 8 bits": {"trainer": _BF16 | {"optimizer": "adamw_8bit"}},
    "LoRA over bf16 weights": {"trainer": _BF16 | {"gradient_checkpointing": True}, "model": {"lora": _ADAPTERS}},
    "QLoRA over int8": {
        "trainer": _BF16 | {"gradient_checkpointing": True},
        "model": {"lora": _ADAPTERS, "quantization": "int8"},
    },
    "QLoRA over nf4": {
        "trainer": _BF16 | {"gradient_checkpointing": True},
        "model": {"lora": _ADAPTERS, "quantization": "nf4"},
    },
}
"""Sections of the run file that differ. All of them compute in bf16."""


def trainable_copy(name: str, folder: Path) -> Path:
    """Copy a benchmark model to `folder`, with an EOS token within its vocabulary: a run needs one."""
    source = model_dir(name)
    folder.mkdir()
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"eos_token_id": 0},
        "generation_config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<pad>"},
    }
    for file in source.iterdir():
        if file.name in changes:
            (folder / file.name).write_text(json.dumps(json.loads(file.read_text()) | changes[file.name]))
        elif file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["content"] != "<eos>"]
    del tokenizer["model"]["vocab"]["<eos>"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def run_file(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The run: no evaluation, no checkpoint before its end."""
    own = WAYS[args.way]
    return {
        "name": "memory",
        "steps": 2,
        "threads": 1,
        "model": {"path": str(model), **own.get("model", {})},
        "taskset": {"function": "bench.ours.step:rows", "options": {"model": args.model}},
        "rewards": [{"name": "python", "function": "bench.ours.step:even_ids", "processes": 1}],
        "algorithm": {"name": "grpo"},
        "rollout": {"batch": args.prompts, "group_size": args.group, "max_new_tokens": args.new_tokens},
        "trainer": {"lr": 1e-5, "micro_batch_tokens": args.micro_batch_tokens, "logprob_chunk": 64, **own["trainer"]},
        "checkpoint": {"every": 1000},
    }


def predicted_gib(path: Path, new_tokens: int) -> float:
    """Peak that `rollmill plan` predicts for a run file from the sizes of the model, in GiB."""
    from rollmill.apps.plan.planning.estimate import estimate_run

    stages = estimate_run(path, prompt_tokens=PROMPT, mean_tokens=new_tokens)
    return max(phase.total for stage in stages for phase in stage.memory.values()) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    args, channel = parser.parse_args(), Channel()

    def measure() -> dict[str, Any]:
        import rollmill
        from rollmill.trackers.run_views import PlainView

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.yaml")
            path.write_text(json.dumps(run_file(args, trainable_copy(args.model, Path(folder, "model")))))
            os.environ["ROLLMILL_CACHE"] = folder  # so that the model is verified, as at its first load
            rollmill.run(path, out=Path(folder, "out"), view=PlainView(io.StringIO()))
            lines = Path(folder, "out/metrics.jsonl").read_text().splitlines()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            predicted = predicted_gib(path, args.new_tokens)
        rows = [json.loads(line) for line in lines]
        seconds = [row["seconds/total"] for row in rows if "loss" in row]
        return {"gib": peak, "predicted": predicted, "seconds": seconds[-1], "loss": rows[-1].get("loss")}

    serve(channel, measure, versions=versions("torch", "transformers"))


if __name__ == "__main__":
    main()
