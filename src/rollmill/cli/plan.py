"""`rollmill plan CONFIG`: predict the cost of a run from a short measurement, and how to split it over cores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.printing import print_json, print_line, print_table

if TYPE_CHECKING:
    from rollmill.planning.memory import PhaseMemory
    from rollmill.planning.planner import StagePlan

_GB = 1e9


def command(
    config: Annotated[Path, typer.Argument(help="Run file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value (repeatable).")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores (or GPUs) to split. Default: this machine's.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Device memory in GB. Default: this machine's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum completion length during the measurement.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a run file briefly and predict memory, tokens per second, step time and the best split over processes."""
    from rollmill.planning.planner import plan_run

    print("measuring a few small steps of every stage ...", file=sys.stderr)
    plans = plan_run(config, overrides or [], cores=cores, memory_gb=memory_gb, max_tokens=max_tokens)
    if as_json:
        print_json({"config": str(config), "stages": [plan.to_json() for plan in plans]})
        return
    for plan in plans:
        print_plan(plan)


def print_plan(plan: StagePlan) -> None:
    """Print the plan of a stage."""
    step, found = plan.prediction, plan.found
    print_line(
        f"stage {plan.stage.name}: {step.seconds['total']:.3g} s a step, {step.tokens_per_second:.4g} tokens a second "
        f"({len(found.samples)} steps measured in {found.seconds:.0f} s; {found.precision} on {found.device}, "
        f"{found.threads} thread(s))"
    )
    if step.generated:
        _show_rollouts(plan)
    print_table("Seconds of a step", ["phase", "seconds"], [[name, each] for name, each in step.seconds.items()])
    rows = [[phase, *_row(memory), _gb(plan.least[phase].total)] for phase, memory in plan.memory.items()]
    print_table("Memory in GB", ["phase", "takes", "of which", "with residency"], rows)
    print_table("Memory of `train` in GB, by rank", ["rank", "takes", "of which"], _rows(plan.ranks))
    if plan.processes:
        print_table("Memory in GB, of processes apart", ["process", "takes", "of which"], _rows(plan.processes))
        _show_splits(plan)
    for problem in plan.too_large:
        print_line(f"does not fit: {problem}")


def _show_rollouts(plan: StagePlan) -> None:
    step = plan.prediction
    print_line(
        f"a step rolls out {step.completions} completions of {step.mean_tokens:.1f} tokens, at most {step.max_tokens}; "
        f"{100 * step.learned:.0f} % of those measured taught something; if all do, training takes "
        f"{step.full_train_s:.3g} s"
    )
    if step.cut:
        print_line(f"{100 * step.cut:.0f} % of completions were longer than --max-tokens; their length is extrapolated")


def _show_splits(plan: StagePlan) -> None:
    best = plan.best
    rows = [
        [_split(each.explorers), each.max_staleness, each.step_s, each.tokens_per_second, f"{100 * each.waits:.0f} %"]
        for each in plan.splits
    ]
    header = ["processes", "max_staleness", "s a step", "tokens a second", "trainer waits"]
    cuda, each = plan.found.device.type == "cuda", plan.found.cores_each
    of_its_own = "a GPU" if cuda else "a core" if each == 1 else f"{each} cores"
    print_table(f"Splits, each process on {of_its_own} of its own", header, rows)
    if best.explorers:
        gpus = ", gpus: 1, trainer_gpus: 1" if cuda else ""
        keys = f"placement: {{name: ray, explorers: {best.explorers}{gpus}}}, max_staleness: {best.max_staleness}"
        gain = plan.prediction.seconds["total"] / best.step_s
        print_line(f"best: {keys} ({gain:.2f} times as fast as one process)")
    else:
        print_line("best: placement: inline")


def _split(explorers: int) -> str:
    return f"trainer and {explorers} explorer{'s' * (explorers > 1)}" if explorers else "one"


def _rows(memories: dict[str, PhaseMemory]) -> list[list[str]]:
    return [[name, *_row(memory)] for name, memory in memories.items()]


def _row(memory: PhaseMemory) -> list[str]:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    return [_gb(memory.total), ", ".join(f"{name.replace('_', ' ')} {_gb(size)}" for name, size in parts)]


def _gb(size: float) -> str:
    return f"{size / _GB:.3g}"
