"""Worker: one GRPO step per command, as in a run: rollout, reward, update, publish."""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

from bench.models import PROMPT, model_dir, prompts, set_allocator
from bench.worker import Channel, versions


def rows(model: str) -> list[dict[str, Any]]:
    """Rows of the taskset: random prompts."""
    return [{"prompt": " ".join(f"w{token}" for token in ids)} for ids in prompts(model, 256, PROMPT)]


def even_ids(task: Any, completion: Any) -> float:
    """Reward: share of even token ids."""
    return float((completion.token_ids % 2 == 0).mean())


def build_stage(
    args: argparse.Namespace,
    reward: str,
    lr: float = 1e-5,
    *,
    max_staleness: int = 0,
    engine: Any = None,
    explorers: Any = None,
    run_dir: Path = Path(),
    policy: Any = None,
    taskset: Any = None,
    **rollout: Any,
) -> Any:
    """Build the stage of a run with this reward function; returns it and its precision.

    `policy` and `taskset` take the place of the model `args.model` and its prompts.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from rollmill.config.algorithms import GRPO
    from rollmill.config.engines import NativeEngineConfig
    from rollmill.config.rollout import RolloutConfig
    from rollmill.config.run import StageConfig
    from rollmill.config.taskset import TasksetConfig
    from rollmill.config.trainer import TrainerConfig
    from rollmill.data import load_taskset
    from rollmill.models.cpu.step_timing import choose_precision
    from rollmill.models.load import PolicyModel
    from rollmill.orchestrator.buffers import Buffers
    from rollmill.orchestrator.context import RunContext
    from rollmill.orchestrator.stages import Stage
    from rollmill.orchestrator.task_selection import StageTasks
    from rollmill.rewards.builtin.python import PythonReward

    set_allocator(args.model)
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if policy is None:
        folder = model_dir(args.model)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        policy = PolicyModel(model, tokenizer, frozenset(), 0, model.config.max_position_embeddings, device)
    precision = choose_precision(policy.model, device) if args.dtype == "auto" else args.dtype
    config = StageConfig(
        steps=1000,
        max_staleness=max_staleness,
        engine=engine or NativeEngineConfig(),
        taskset=taskset or TasksetConfig(function="bench.ours.step:rows", options={"model": args.model}),
        rollout=RolloutConfig(batch=args.prompts, group_size=args.group, max_new_tokens=args.new_tokens, **rollout),
        rewards=[PythonReward(name="python", function=reward, processes=1)],
        algorithm=GRPO(),
        trainer=TrainerConfig(lr=lr),
    )
    tasks = StageTasks(load_taskset(config.required_taskset), examples=None, held_out={}, notes=[])
    buffers = Buffers(run_dir, "", read_only=True)
    context = RunContext(run_dir, uuid.uuid4().hex, 0, precision, 1, buffers, explorers=explorers)
    return Stage(config, policy, tasks, context, index=0, first_version=0), precision


async def serve_steps(channel: Channel, args: argparse.Namespace, **options: Any) -> None:
    """Build the stage of a run and run one step per command; `options` are arguments of `build_stage`."""
    began = time.perf_counter()
    from rollmill.startup import quick_imports

    with quick_imports():  # as `rollmill run` does
        import torch

        from rollmill.orchestrator.loop import train_step

        stage, precision = build_stage(args, "bench.ours.step:even_ids", **options)
    channel.say(
        startup_s=time.perf_counter() - began,
        dtype=precision,
        versions=versions("torch", "transformers"),
    )
    for _ in channel.commands():
        started, cpu = time.perf_counter(), time.process_time()
        result = await train_step(stage)
        if args.device == "cuda":
            torch.cuda.synchronize()
        channel.say(
            seconds=time.perf_counter() - started,
            cpu_s=time.process_time() - cpu,
            tokens=result.generated_tokens,
            phases={name: round(value, 4) for name, value in result.seconds.items()},
        )
    await stage.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    asyncio.run(serve_steps(Channel(), args))


if __name__ == "__main__":
    main()
