"""Worker: several GRPO steps per command, with explorers in this process or on Ray."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.ours.step import build_stage
from bench.worker import Channel, versions

SETTLE = 4
"""Steps before the clock starts (plus max_staleness), which use up the work that explorers did between commands."""


async def serve_steps(channel: Channel, args: argparse.Namespace, folder: Path) -> None:
    """Run the parent's commands."""
    from rollmill.config.engines import NativeEngineConfig
    from rollmill.orchestrator.loop import train_step

    explorers = ray_explorers(args.explorers, folder) if args.placement == "ray" else None
    more: dict[str, Any] = {"max_staleness": args.max_staleness, "explorers": explorers, "run_dir": folder}
    more["engine"] = NativeEngineConfig(after_update=args.after_update)
    stage, precision = build_stage(args, "bench.ours.step:even_ids", **more)
    stage.begin({})
    await train_step(stage)
    channel.say(dtype=precision, versions=versions("torch", "transformers", "ray"))
    for _ in channel.commands():
        for _ in range(SETTLE + args.max_staleness):
            await train_step(stage)
        began, staleness = time.perf_counter(), 0.0
        phases: dict[str, float] = {}
        for _ in range(args.steps):
            result = await train_step(stage)
            staleness = max(staleness, result.metrics["staleness/max"])
            for name, seconds in result.seconds.items():
                phases[name] = round(phases.get(name, 0.0) + seconds / args.steps, 4)
        seconds = time.perf_counter() - began
        channel.say(steps_per_s=args.steps / seconds, staleness=staleness, phases=phases)
    await stage.close()


def ray_explorers(count: int, folder: Path) -> Any:
    """Start explorers on a Ray of this process."""
    from rollmill.config.placement import RayPlacement
    from rollmill.ray_session import join
    from rollmill.remote.placement_group import PlacementGroup
    from rollmill.remote.ray_explorers import RayExplorers
    from rollmill.remote.ray_scaling import ExplorerActors, explorer_needs

    placement = RayPlacement(explorers=count)
    join(placement.address)
    group = PlacementGroup(explorer_needs(placement, count), one_host=False)
    return RayExplorers(placement, folder, ExplorerActors(placement, group, folder, count).used, silent_s=20.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--placement", choices=("inline", "ray"), required=True)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--after-update", choices=("recompute", "keep"), default="recompute")
    parser.add_argument("--explorers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", default="m3")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.set_defaults(device="cpu")
    with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
        asyncio.run(serve_steps(Channel(), parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
