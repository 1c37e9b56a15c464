"""Worker: repairs the quickstart's checkpoint on sums of mixed difficulty, with one sampler."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from bench.ours.repair import repair_stage
from bench.worker import Channel, versions

TRAINED, BALANCED = (0.9, 0.07, 0.03), (1 / 3, 1 / 3, 1 / 3)


async def serve_learning(channel: Channel, args: argparse.Namespace) -> None:
    """Build the repair stage on the checkpoint and run the parent's commands."""
    from rollmill.config.taskset import TasksetConfig
    from rollmill.orchestrator.loop import train_step

    train = TasksetConfig(
        function="bench.sums:rows",
        options={"size": args.tasks, "seed": args.seed, "shares": TRAINED},
        sampler=args.sampler,
    )
    held_out = TasksetConfig(
        function="bench.sums:rows",
        options={"size": args.held_out, "seed": 7, "shares": BALANCED, "held_out": True},
    )
    stage, precision, accuracy = repair_stage(args, train, held_out)
    channel.say(accuracy=await accuracy(), dtype=precision, versions=versions("torch", "transformers"))
    for _ in channel.commands():
        report: dict[str, Any] = {"rollouts": 0, "tokens": 0, "seconds": 0.0, "uniform": 0.0}
        for _ in range(args.every):
            result = await train_step(stage)
            report["rollouts"] += result.metrics["completions"]
            report["tokens"] += result.generated_tokens
            report["seconds"] += result.seconds["total"]
            report["uniform"] += _uniform(result.experiences) / args.every
        channel.say(**report, accuracy=await accuracy())
    await stage.close()


def _uniform(experiences: list[Any]) -> float:
    """Share of groups with equal rewards, which have no training signal."""
    groups: dict[str, set[float | None]] = {}
    for each in experiences:
        groups.setdefault(each.group, set()).add(each.reward)
    return sum(len(rewards) == 1 for rewards in groups.values()) / len(groups)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sampler", type=json.loads, required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--held-out", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    asyncio.run(serve_learning(Channel(), parser.parse_args()))


if __name__ == "__main__":
    main()
