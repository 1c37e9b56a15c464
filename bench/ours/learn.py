"""Worker: repairs the quickstart's checkpoint; each command runs a few steps and evaluates."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from bench.ours.repair import repair_stage
from bench.worker import Channel, versions


async def serve_learning(channel: Channel, args: argparse.Namespace) -> None:
    """Build the repair stage on the checkpoint and run the parent's commands."""
    from rollmill.startup import quick_imports

    with quick_imports():  # as `rollmill run` does
        from rollmill.config.taskset import TasksetConfig
        from rollmill.orchestrator.loop import train_step

        train, held_out = (TasksetConfig(path=args.folder / name) for name in ("train.jsonl", "held_out.jsonl"))
        stage, precision, accuracy = repair_stage(args, train, held_out)
    channel.say(accuracy=await accuracy(), dtype=precision, versions=versions("torch", "transformers"))
    for _ in channel.commands():
        report: dict[str, Any] = {"seconds": 0.0, "tokens": 0}
        for _ in range(args.every):
            result = await train_step(stage)
            report["seconds"] += result.seconds["total"]
            report["tokens"] += result.generated_tokens
        channel.say(**report, accuracy=await accuracy())
    await stage.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    asyncio.run(serve_learning(Channel(), parser.parse_args()))


if __name__ == "__main__":
    main()
