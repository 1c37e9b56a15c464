"""Worker: the practice stage of a task of the board; each command runs a few steps and evaluates.

With `--evaluate` the evaluations are of a stage with other settings, on the same policy.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from bench.worker import Channel, versions


async def serve_learning(channel: Channel, args: argparse.Namespace) -> None:
    """Build the stage and run the parent's commands."""
    from rollmill.startup import quick_imports

    with quick_imports():  # as `rollmill run` does
        from rollmill.config.loader import load_run
        from rollmill.orchestrator.buffers import Buffers
        from rollmill.orchestrator.loop import train_step
        from rollmill.orchestrator.setup import set_up_run
        from rollmill.orchestrator.stages import Stage

        if args.levels is not None:
            from rollmill.models.cpu import int8

            # the same code then rounds to fewer bits, which is no setting of a run
            vars(int8)["_LEVELS"] = args.levels
        loaded = load_run(args.file, [*args.set, f"seed={args.seed}", "threads=1"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        setup = set_up_run(loaded, folder, None)
        context = setup.context(folder, Buffers(folder, setup.run_id, read_only=True))
        stage = Stage(setup.loaded.stages[-1], setup.policy, setup.tasks[-1], context, index=0, first_version=0)

        evaluating = stage
        if args.evaluate:
            other = load_run(args.file, [*args.set, *args.evaluate, f"seed={args.seed}", "threads=1"]).stages[-1]
            evaluating = Stage(other, setup.policy, setup.tasks[-1], context, index=0, first_version=0)

        async def accuracy() -> float:
            assert evaluating.evaluator is not None
            if evaluating is not stage:
                evaluating.engine.weights_updated(stage.version)
            found = (await evaluating.evaluator.evaluate()).metrics
            return float(found["eval/sampled"])

        channel.say(accuracy=await accuracy(), dtype=setup.precision, versions=versions("torch", "transformers"))
        for command in channel.commands():
            report: dict[str, Any] = {"seconds": 0.0, "tokens": 0, "completions": 0}
            phases: dict[str, float] = {}
            gaps: list[float] = []
            for _ in range(command["steps"]):
                result = await train_step(stage)
                report["seconds"] += result.seconds["total"]
                report["tokens"] += result.generated_tokens
                report["completions"] += len(result.experiences)
                gaps.append(result.metrics.get("logprob_gap/mean", 0.0))
                for name, seconds in result.seconds.items():
                    phases[name] = round(phases.get(name, 0.0) + seconds, 3)
            channel.say(**report, accuracy=await accuracy(), phases=phases, gap=max(gaps))
        if evaluating is not stage:
            await evaluating.close()
        await stage.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--levels", type=int, help="of int8 weights and inputs on either side of 0, instead of 127")
    parser.add_argument("--evaluate", action="append", default=[], help="settings of the evaluating stage")
    asyncio.run(serve_learning(Channel(), parser.parse_args()))


if __name__ == "__main__":
    main()
