"""Worker: per command one step with free rewards, the same step with costly rewards, and these rewards alone.

All rewards, one after the other, take as long as the rollouts. Nothing is learned, so that two stages with the same
seed roll out the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from bench.ours.step import build_stage
from bench.worker import Channel, versions


def costly(task: Any, completion: Any) -> float:
    """Share of even token ids, after computing or sleeping for the seconds in the task."""
    seconds, waits = task.metadata.get("cost", (0.0, True))
    if waits:
        time.sleep(seconds)
    else:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass
    return float((completion.token_ids % 2 == 0).mean())


async def serve(channel: Channel, args: argparse.Namespace) -> None:
    began = time.perf_counter()
    stops = list(range(0, args.vocabulary, args.mean_tokens))
    free, precision = build_stage(args, "bench.ours.overlap:costly", lr=1e-12, stop_token_ids=stops)
    stage, _ = build_stage(args, "bench.ours.overlap:costly", lr=1e-12, stop_token_ids=stops)
    channel.say(startup_s=time.perf_counter() - began, dtype=precision, versions=versions("torch", "transformers"))
    for _ in channel.commands():
        rollout_s, alone = await collected(free, 0.0, args.waits)
        count = args.prompts * args.group
        together_s, experiences = await collected(stage, rollout_s / count, args.waits)
        assert [len(each.token_ids) for each in experiences] == [len(each.token_ids) for each in alone]
        rewards_s = await judged(stage, experiences, rollout_s / count, args.waits)
        channel.say(
            rollout_s=rollout_s,
            rewards_s=rewards_s,
            together_s=together_s,
            of_the_longer=together_s / max(rollout_s, rewards_s),
        )
    await free.close()
    await stage.close()


async def collected(stage: Any, seconds: float, waits: bool) -> tuple[float, list[Any]]:
    """Run one step; returns the seconds to collect and score its batch, and the batch."""
    from rollmill.orchestrator.loop import collect, update

    for task in stage.tasks.training.tasks:
        task.metadata["cost"] = (seconds, waits)
    started = time.perf_counter()
    experiences = await collect(stage)
    passed = time.perf_counter() - started
    await update(stage, experiences)
    return passed, experiences


async def judged(stage: Any, experiences: list[Any], seconds: float, waits: bool) -> float:
    """Seconds to score a finished batch."""
    from rollmill.types import Completion, Task

    def again(experience: Any) -> Completion:
        ids = experience.token_ids[experience.action_mask]
        none = experience.logprobs[:0]
        return Completion(ids[:0], ids, none, ids[:0], none, "", experience.stop_reason, seed=0, index=0)

    task = Task("judged", "", metadata={"cost": (seconds, waits)})
    completions = [again(experience) for experience in experiences]
    started = time.perf_counter()
    await asyncio.gather(*(stage.rewards.score(task, completion) for completion in completions))
    return time.perf_counter() - started


def main() -> None:
    from bench.models import SHAPES

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--mean-tokens", type=int, default=48)
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.vocabulary = SHAPES[args.model].vocab_size
    asyncio.run(serve(Channel(), args))


if __name__ == "__main__":
    main()
