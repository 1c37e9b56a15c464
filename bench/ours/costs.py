"""Worker: costs of the parts of a step, measured in one process: decode passes, training, weight transfer.

With `--beside` a second process works at the same time, as when trainer and explorer share a machine: it trains while
the explorer's costs are measured, and decodes during the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.models import PROMPT, prompts
from bench.ours.step import build_stage
from bench.ours.train_step import ready_made
from bench.worker import Channel, versions

FEWER = 4
"""A second measurement has a batch smaller by this factor, which shows the dependence on the batch."""
MANY = 256
"""Maximum number of completions that the engine decodes together."""
TRAINER = ("train_s", "publish_s")
"""Costs of the trainer; the others are the explorer's."""


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the costs of a simulation, as JSON; training by the number of groups."""
    from rollmill.apps.plan.planning.calibration import measure_weight_transfer
    from rollmill.apps.plan.planning.measurement import record_engine_steps
    from rollmill.apps.plan.planning.rollouts import EngineStepCosts
    from rollmill.orchestrator.loop import train_step

    train: dict[int, list[float]] = {}
    around, judge, passes = [], [], []
    for batch in (max(1, args.prompts // FEWER), args.prompts):
        options = argparse.Namespace(**vars(args) | {"prompts": batch})
        stage, precision = build_stage(options, "bench.ours.step:even_ids", run_dir=folder)
        stage.begin({})
        await train_step(stage)
        for _ in range(args.steps):
            with record_engine_steps(stage.engine) as found:
                seconds = (await train_step(stage)).seconds
            passes += found
            train.setdefault(batch, []).append(seconds["total"] - seconds["rollout"] - seconds["reward"])
            around.append((seconds["rollout"] - sum(each.seconds for each in found)) / batch)
            judge.append(seconds["reward"])
        if batch == args.prompts:
            passes += await many_rows(stage.engine, args)
            again = await recomputed(stage.engine, args)
            publish_s, take_s = measure_weight_transfer(stage.policy, precision)
        await stage.close()
    return {
        "passes": asdict(EngineStepCosts.fitted(passes)),
        "train_s": {str(batch): times for batch, times in train.items()},
        "group_s": max(statistics.median(around), 0.0),
        "judge_s": statistics.median(judge),
        "publish_s": publish_s,
        "take_s": take_s,
        "again_s": again,
    }


async def many_rows(engine: Any, args: argparse.Namespace) -> list[Any]:
    """Measure passes with the maximum number of completions."""
    from rollmill.apps.plan.planning.measurement import record_engine_steps

    with record_engine_steps(engine) as passes:
        await asyncio.gather(*asked(engine, args, MANY // args.group))
    return passes


async def recomputed(engine: Any, args: argparse.Namespace) -> float:
    """Additional seconds of the first pass with new weights, per half-finished completion."""
    work = [asyncio.ensure_future(each) for each in asked(engine, args, MANY // args.group)]
    while engine.core.load()[0] < MANY * args.new_tokens // 2:
        await asyncio.sleep(0)
    began = time.perf_counter()
    engine.core.step()
    usual = time.perf_counter() - began
    engine.weights_updated(engine.version)
    began = time.perf_counter()
    engine.core.step()
    more = time.perf_counter() - began - usual
    await asyncio.gather(*work)
    return float(max(more, 0.0) / MANY)


def asked(engine: Any, args: argparse.Namespace, count: int) -> Iterator[Any]:
    """Requests for groups."""
    from rollmill.config.rollout import SamplingConfig
    from rollmill.engines.base import GenerationRequest

    sampling = SamplingConfig(max_new_tokens=args.new_tokens)
    for ids in prompts(args.model, count, PROMPT):
        yield engine.generate(GenerationRequest(prompt_ids=ids, sampling=sampling, n=args.group, seed=1))


@contextmanager
def company(args: argparse.Namespace, work: str) -> Iterator[None]:
    """Run another process that trains or decodes repeatedly."""
    options = [
        f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("model", "prompts", "group", "new_tokens")
    ]
    child = subprocess.Popen([sys.executable, "-m", "bench.ours.costs", f"--endless={work}", *options])
    try:
        time.sleep(args.settle)
        yield
    finally:
        child.kill()
        child.wait()


def beside(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the costs of either side while the other one works."""
    with company(args, "train"):
        costs = asyncio.run(measure(args, folder))
    with company(args, "decode"):
        trainers = asyncio.run(measure(args, folder))
    return costs | {name: trainers[name] for name in TRAINER}


async def endless(args: argparse.Namespace, folder: Path) -> None:
    """Train or decode until the parent process ends."""
    parent = os.getppid()
    trainer, batch = ready_made(args)
    stage, _ = build_stage(args, "bench.ours.step:even_ids", run_dir=folder)
    while os.getppid() == parent:
        if args.endless == "train":
            trainer.step(batch, 0)
        else:
            await many_rows(stage.engine, args)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--endless", choices=("train", "decode"))
    parser.add_argument("--settle", type=float, default=12.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", default="m3")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="auto")
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-costs-") as folder:
        if args.endless:
            asyncio.run(endless(args, Path(folder)))
            return
        channel = Channel()
        channel.say(versions=versions("torch", "transformers"))
        for _ in channel.commands():
            costs = beside(args, Path(folder)) if args.beside else asyncio.run(measure(args, Path(folder)))
            channel.say(**costs)


if __name__ == "__main__":
    main()
