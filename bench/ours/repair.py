"""The quickstart's second stage on a warm-started checkpoint, for the workers of `learn` and `curriculum`."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.config.taskset import TasksetConfig
    from rollmill.orchestrator.stages import Stage


def repair_stage(
    args: argparse.Namespace,
    train: TasksetConfig,
    held_out: TasksetConfig,
    changes: dict[str, Any] | None = None,
) -> tuple[Stage, str, Callable[[], Awaitable[float]]]:
    """Build the stage on the checkpoint `args.folder / "model"`; returns it, its compute type and an evaluation.

    The evaluation measures sampled accuracy.

    Args:
        changes: overrides of the stage's keys; sections are merged.
    """
    import torch

    from rollmill.config.loader import load_run
    from rollmill.config.model import ModelConfig
    from rollmill.data import load_taskset
    from rollmill.models.cpu.step_timing import choose_precision
    from rollmill.models.load import load_policy
    from rollmill.orchestrator.buffers import Buffers
    from rollmill.orchestrator.context import RunContext
    from rollmill.orchestrator.stages import Stage
    from rollmill.orchestrator.task_selection import select_tasks
    from rollmill.quickstart import addition

    torch.set_num_threads(1)
    config = load_run(Path(addition.__file__).with_suffix(".yaml")).stages[1]
    assert config.evaluation is not None
    measured = {"limit": None, "greedy": False, "samples": 1, "every": args.every, "taskset": held_out}
    evaluation = config.evaluation.model_copy(update=measured)
    config = config.model_copy(update={"taskset": train, "evaluation": evaluation, "steps": 1000})
    for name, value in (changes or {}).items():
        inside = isinstance(value, dict)
        config = config.model_copy(update={name: getattr(config, name).model_copy(update=value) if inside else value})
    device = torch.device("cpu")
    policy = load_policy(ModelConfig(path=args.folder / "model"), texts=[], seed=args.seed, device=device)
    precision = choose_precision(policy.model, device)
    tasks = select_tasks(config, policy, load_taskset(train), {"": load_taskset(held_out)})
    buffers = Buffers(args.folder, "", read_only=True)
    context = RunContext(args.folder, "", args.seed, precision, 1, buffers)
    stage = Stage(config, policy, tasks, context, index=0, first_version=0)

    async def accuracy() -> float:
        assert stage.evaluator is not None
        evaluated = await stage.evaluator.evaluate()
        return evaluated.metrics["eval/sampled"]

    return stage, precision, accuracy
