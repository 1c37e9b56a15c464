"""Worker: one step of examples/real.yaml per command, as in a run: rollout, reward, update, publish."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from bench.harness import ROOT
from bench.worker import Channel, versions


async def serve_steps(channel: Channel, settings: list[str]) -> None:
    """Build the last stage of the run file, on the model as it comes, and run one step per command."""
    from rollmill.config.loader import load_run
    from rollmill.orchestrator.loop import train_step
    from rollmill.orchestrator.setup import prepare_first_stage
    from rollmill.orchestrator.stages import Stage

    loaded = load_run(ROOT / "examples" / "real.yaml", [*settings, "threads=1"])
    with tempfile.TemporaryDirectory() as folder:
        setup, context = prepare_first_stage(loaded, Path(folder))
        stage = Stage(setup.loaded.stages[-1], setup.policy, setup.tasks[-1], context, index=0, first_version=0)
        channel.say(dtype=context.precision, versions=versions("torch", "transformers", "gguf"))
        for _ in channel.commands():
            started, cpu = time.perf_counter(), time.process_time()
            result = await train_step(stage)
            channel.say(
                seconds=time.perf_counter() - started,
                cpu_s=time.process_time() - cpu,
                tokens=result.generated_tokens,
                reward=sum(each.reward or 0.0 for each in result.experiences) / len(result.experiences),
                phases={name: round(value, 3) for name, value in result.seconds.items()},
            )
        await stage.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[])
    asyncio.run(serve_steps(Channel(), parser.parse_args().set))


if __name__ == "__main__":
    main()
