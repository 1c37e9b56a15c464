"""Worker: a stage whose completions have log-normal lengths, or the quickstart's repair."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

from bench.worker import Channel, versions

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 128},
    "m3": {"hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 512},
}


def rows(size: int) -> Iterator[dict[str, str]]:
    """Prompts of 16 random digits."""
    import random

    source = random.Random(0)
    for _ in range(size):
        yield {"prompt": "".join(source.choice("0123456789") for _ in range(16))}


def length(seed: int, median: int, longest: int) -> int:
    """Tokens of the completion with this seed: log-normal, sigma 1, cut at `longest`."""
    from rollmill.seeds import derive_seed

    share = (derive_seed(seed, 0x7A11) % (1 << 52) + 0.5) / (1 << 52)
    return max(1, min(longest, round(median * math.exp(NormalDist().inv_cdf(share)))))


def drawn_lengths_engine(median: int, longest: int) -> Any:
    """Make a factory of native engines whose completions end at a length drawn from their seed, even if interrupted."""
    from rollmill.config.engines import NativeEngineConfig
    from rollmill.config.run import StageConfig
    from rollmill.engines.base import GenerationRequest
    from rollmill.engines.native import NativeEngine
    from rollmill.engines.native.build import build_native
    from rollmill.engines.native.sequence import SequenceGroup, SequenceState
    from rollmill.models.load import PolicyModel
    from rollmill.types import StopReason

    class DrawnRow(SequenceState):
        __slots__ = ()

        def append(self, *token: Any) -> bool:
            return super().append(*token) or self.is_whole()

        def is_whole(self) -> bool:
            """Whether it has reached the drawn length."""
            if len(self.tokens) < length(self.seed, median, longest):
                return False
            self.stop_reason = StopReason.LENGTH
            return True

    class DrawnLengths(NativeEngine):
        lengths: list[int] = []  # noqa: RUF012  of all started completions

        def submit(self, request: GenerationRequest) -> SequenceGroup:
            group = super().submit(request)
            for row in list(group.waiting):
                row.__class__ = DrawnRow
                if not row.tokens:
                    self.lengths.append(length(row.seed, median, longest))
                elif row.is_whole():  # type: ignore[attr-defined]
                    group.waiting.remove(row)
                    group.hand_out(row)
            return group

    def made(policy: PolicyModel, config: StageConfig, precision: str, *, trained_on: bool) -> NativeEngine:
        engine = build_native(NativeEngineConfig(), policy, config.rollout, precision)
        engine.__class__ = DrawnLengths
        engine._eos_ids = frozenset()
        return engine

    return made


def tail_stage(args: argparse.Namespace) -> Any:
    """Return a function that builds the stage again, on the same policy."""
    import torch

    from rollmill.config.model import ModelConfig
    from rollmill.config.run import StageConfig
    from rollmill.data import load_taskset
    from rollmill.models.load import load_policy
    from rollmill.orchestrator import rollouts, stages
    from rollmill.orchestrator.buffers import Buffers
    from rollmill.orchestrator.context import RunContext
    from rollmill.orchestrator.task_selection import select_tasks

    torch.set_num_threads(1)
    options = {"size": 4 * args.steps * args.prompts}
    new = {**SHAPES[args.model], "context": 2 * args.longest, "tokenizer": {"kind": "char"}}
    config = StageConfig.model_validate(
        {
            "steps": args.steps,
            "max_staleness": args.max_staleness,
            "taskset": {"function": "bench.ours.tail:rows", "options": options, "sampler": "sequential"},
            "rewards": [{"name": "format", "pattern": ".*[0-4]"}],
            "trainer": {"lr": 1e-5, "precision": "fp32"},
            "rollout": {
                "batch": args.prompts,
                "group_size": args.group,
                "max_new_tokens": args.longest,
                **args.rollout,
            },
        }
    )
    model = ModelConfig.model_validate({"path": "new", "new": new})
    policy = load_policy(model, texts=lambda: iter(["0123456789"]), seed=0, device=torch.device("cpu"))
    tasks = select_tasks(config, policy, load_taskset(config.required_taskset), {})
    vars(rollouts)["build_engine"] = drawn_lengths_engine(args.median, args.longest)
    buffers = Buffers(Path(), "", read_only=True)

    def make() -> stages.Stage:
        context = RunContext(Path(), "", args.seed, "fp32", 1, buffers)
        stage = stages.Stage(config, policy, tasks, context, index=0, first_version=0)
        stage.begin({})
        return stage

    return make


class Clock:
    """Processor time of a stage's rollouts, in seconds, which other programs do not affect."""

    def __init__(self, stage: Any) -> None:
        self.seconds, self._roll_out = 0.0, stage.batches.roll_out
        stage.batches.roll_out = self

    async def __call__(self, version: int, *, deadlines: int) -> None:
        began = time.process_time()
        await self._roll_out(version, deadlines=deadlines)
        self.seconds += time.process_time() - began


async def serve_tail(channel: Channel, args: argparse.Namespace) -> None:
    """Run the stage from its start at each command."""
    from rollmill.apps.plan.planning.measurement import record_engine_steps
    from rollmill.orchestrator.loop import train_step

    make = tail_stage(args)
    warm = make()
    await train_step(warm)
    await warm.close()
    channel.say(versions=versions("torch", "transformers"))
    for _ in channel.commands():
        stage = make()
        engine = stage.engine
        engine.lengths = []
        report: dict[str, Any] = {"tokens": 0, "rollout_s": 0.0, "total_s": 0.0, "length_bias": []}
        clock, began = Clock(stage), time.process_time()
        learned: list[str] = []
        lengths: list[int] = []
        with record_engine_steps(engine) as passes:
            for _ in range(args.steps):
                result = await train_step(stage)
                own = [each.turns[-1].end - each.turns[-1].start for each in result.experiences]
                report["tokens"] += sum(own)
                report["rollout_s"] += result.seconds["rollout"]
                report["total_s"] += result.seconds["total"]
                if (bias := result.metrics.get("rollout/length_bias")) is not None:
                    report["length_bias"].append(round(bias, 3))
                lengths += own
                learned += list(dict.fromkeys(each.task_id for each in result.experiences))
        waiting = [id for id, _ in stage.state.again]
        numbers = sorted(int(id.rpartition(":")[2]) for id in (*learned, *waiting))
        report |= {
            "generated": engine.tokens_generated,
            "per_pass": report["tokens"] / len(passes),
            "per_second": report["tokens"] / clock.seconds,
            "per_second_of_steps": report["tokens"] / (time.process_time() - began),
            "per_second_of_the_clock": report["tokens"] / report["rollout_s"],
            "prompts": len(numbers),
            "lost": len(set(range(numbers[0], numbers[0] + len(numbers))) - set(numbers)),
            "doubled": len(numbers) - len(set(numbers)),
            "mean_length": sum(lengths) / len(lengths),
            "true_bias": sum(lengths) / len(lengths) / (sum(engine.lengths) / len(engine.lengths)),
        }
        await stage.close()
        channel.say(**report)


async def serve_repair(channel: Channel, args: argparse.Namespace) -> None:
    """Repair the quickstart's checkpoint for some steps and evaluate, at each command."""
    from bench.ours import repair
    from rollmill.config.taskset import TasksetConfig
    from rollmill.orchestrator.loop import train_step

    train, held_out = (TasksetConfig(path=args.folder / name) for name in ("train.jsonl", "held_out.jsonl"))
    changes = {"max_staleness": args.max_staleness, "rollout": args.rollout}
    stage, _, accuracy = repair.repair_stage(args, train, held_out, changes)
    stage.begin({})
    channel.say(accuracy=await accuracy(), versions=versions("torch", "transformers"))
    for _ in channel.commands():
        report: dict[str, Any] = {"segments": 0.0, "stopped": 0.0}
        for _ in range(args.steps):
            metrics = (await train_step(stage)).metrics
            report["segments"] = max(report["segments"], metrics.get("rollout/segments", 0.0))
            report["stopped"] += metrics.get("rollout/stopped", 0.0)
        channel.say(**report, accuracy=await accuracy())
    await stage.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="repair the checkpoint in this folder")
    parser.add_argument("--model", default="m3")
    for name in ("--prompts", "--group", "--median", "--longest", "--steps", "--seed", "--max-staleness"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--rollout", type=json.loads, default={})
    parser.add_argument("--every", type=int, default=1000)
    args = parser.parse_args()
    asyncio.run((serve_tail if args.folder is None else serve_repair)(Channel(), args))


if __name__ == "__main__":
    main()
