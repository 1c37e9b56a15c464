"""Worker: two epochs of GRPO from one checkpoint per command; the second one's rollouts are measured."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.ours.repair import repair_stage
from bench.worker import Channel, versions


async def serve_epochs(channel: Channel, args: argparse.Namespace) -> None:
    """Run the parent's commands."""
    from rollmill.config.rollout import ReuseConfig
    from rollmill.config.taskset import TasksetConfig
    from rollmill.orchestrator.loop import collect, update

    function = "rollmill.quickstart.addition:rows"
    options = {"size": args.steps * args.batch, "seed": 3, "digits": args.digits}
    train = TasksetConfig(function=function, options=options)
    held_out = TasksetConfig(function=function, options=options | {"size": 1, "held_out": True})
    rollout = {
        "reuse": ReuseConfig() if args.reuse else None,
        "batch": args.batch,
        "max_new_tokens": 12 * (args.digits + 2),
    }
    changes = {"rollout": rollout, "trainer": {"lr": args.lr}}
    channel.say(versions=versions("torch", "transformers"))
    for args.seed, _ in enumerate(channel.commands()):
        stage, precision, _ = repair_stage(args, train, held_out, changes)
        for _ in range(args.steps):
            await update(stage, await collect(stage))
        report: dict[str, Any] = {"seconds": 0.0, "tokens": 0, "score": 0.0, "variance": 0.0, "kl": 0.0}
        for _ in range(args.steps):
            began, before = time.perf_counter(), stage.engine.tokens_generated
            experiences = await collect(stage)
            report["seconds"] += time.perf_counter() - began
            report["tokens"] += stage.engine.tokens_generated - before
            score, variance = scored(stage.policy.model, experiences)
            report["score"], report["variance"] = report["score"] + score, report["variance"] + variance
            report["kl"] += (await update(stage, experiences))["kl"] / args.steps
        counts = stage.engine.core.drafting.counts  # type: ignore[attr-defined]
        channel.say(
            **report,
            tokens_per_s=report["tokens"] / report["seconds"],
            score_z=report["score"] / report["variance"] ** 0.5,
            accepted=counts.reuse_accepted / max(counts.reuse_tested, 1),
            tokens_per_pass=counts.reuse_tested / max(counts.passes, 1),
            dtype=precision,
        )
        await stage.close()


def scored(model: Any, experiences: Sequence[Any]) -> tuple[float, float]:
    """Sum over tokens of log p minus its expectation under the model, and its variance."""
    import torch

    score = variance = 0.0
    with torch.no_grad():
        for each in experiences:
            ids, start = torch.from_numpy(each.token_ids).long(), each.turns[0].end
            logp = model(ids[None]).logits[0, start - 1 : -1].double().log_softmax(-1)
            probs = logp.exp()
            mean = (probs * logp).sum(-1)
            score += float((logp.gather(1, ids[start:, None])[:, 0] - mean).sum())
            variance += float(((probs * logp**2).sum(-1) - mean**2).sum())
    return score, variance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--digits", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--reuse", action="store_true")
    args = parser.parse_args()
    args.every = 1000
    asyncio.run(serve_epochs(Channel(), args))


if __name__ == "__main__":
    main()
