"""`rollmill plan CONFIG`: predict the cost of a run from a short measurement or an estimate, and how to split it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.printing import print_json, print_line, print_table
from rollmill.startup import quick_imports

if TYPE_CHECKING:
    from rollmill.apps.plan.planning.cluster import ClusterPlan
    from rollmill.apps.plan.planning.estimate import StageEstimate
    from rollmill.apps.plan.planning.planner import StagePlan
    from rollmill.orchestrator.stage_memory import PhaseMemory

_GB = 1e9


def command(
    config: Annotated[Path, typer.Argument(help="Run file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value (repeatable).")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores (or GPUs) to split. Default: this machine's.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Device memory in GB. Default: this machine's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum completion length during the measurement.")] = 512,
    cluster: Annotated[
        str | None, typer.Option(metavar="KIND", help="Estimate for GPUs of this kind, such as h100; measures nothing.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="Estimate for GPUs that are not here, such as 8xH200, or 8,64,512 with --cluster KIND."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Estimate for this model: qwen3-8b, or a checkpoint's folder.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="For estimates: tokens of a prompt.")] = 256,
    mean_tokens: Annotated[
        float | None, typer.Option(min=1, help="For estimates: mean tokens of a completion. Default: half the limit.")
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option("--measure/--estimate", help="Measure, or estimate. Default: measure what fits and is quick."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a run file briefly and predict memory, tokens per second, step time and the best split over processes;
    or estimate them, for a model that is large or not here, or for a cluster of GPUs."""
    one_gpu: str | None = None
    if cluster is not None or gpus is not None:
        kind, counts = _wanted_gpus(cluster, gpus)
        one_gpu = kind if counts == [1] else None
    if one_gpu is None and (cluster is not None or gpus is not None):
        with quick_imports():
            from rollmill.apps.plan.planning.cluster import plan_cluster

        found = plan_cluster(
            config,
            overrides or [],
            kind=kind,
            counts=counts,
            prompt_tokens=prompt_tokens,
            mean_tokens=mean_tokens,
            model=model,
        )
        if as_json:
            print_json({"config": str(config), "cluster": kind, "plans": [plan.to_json() for plan in found]})
        else:
            print_clusters(kind, found)
        return
    if measure and one_gpu is not None:
        raise typer.BadParameter("a GPU that is not here cannot be measured on", param_hint="--measure")
    if measure and model is not None:
        raise typer.BadParameter("a preset has no weights to measure; set model.path", param_hint="--measure")
    if not measure:
        with quick_imports():
            from rollmill.apps.plan.planning.estimate import estimate_run

        estimates = estimate_run(
            config,
            overrides or [],
            model=model,
            memory_gb=memory_gb,
            prompt_tokens=prompt_tokens,
            mean_tokens=mean_tokens,
            kind=one_gpu,
        )
        obstacle = next((each.obstacle for each in estimates if each.obstacle), None)
        if obstacle or model is not None or measure is False or one_gpu is not None:
            if as_json:
                print_json({"config": str(config), "estimates": [each.to_json() for each in estimates]})
                return
            if obstacle and model is None and measure is None and one_gpu is None:
                print_line(f"not measured: {obstacle}")
            for estimate in estimates:
                print_estimate(estimate)
            return
    with quick_imports():
        from rollmill.apps.plan.planning.planner import plan_run

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
    print_table("Memory in GB", ["phase", "takes", "of which", "with offloading"], rows)
    print_table("Memory of `train` in GB, by rank", ["rank", "takes", "of which"], _rows(plan.ranks))
    if plan.processes:
        print_table("Memory in GB, of processes apart", ["process", "takes", "of which"], _rows(plan.processes))
        _show_splits(plan)
    for problem in plan.too_large:
        print_line(f"does not fit: {problem}")


def _wanted_gpus(cluster: str | None, gpus: str | None) -> tuple[str, list[int]]:
    """Parse --cluster and --gpus: a kind and numbers of GPUs, as `8xH200`, `8xh200,64xh200`, or `8,64` with --cluster.

    Raises typer.BadParameter.
    """
    if gpus is None:
        assert cluster is not None
        return cluster.lower(), [8, 64, 512]
    kinds, counts = {cluster.lower()} if cluster else set(), []
    for each in gpus.lower().split(","):
        count, _, kind = each.partition("x")
        if not count.strip().isdecimal():
            message = f"{gpus} is neither numbers, such as 8,64,512, nor GPUs of a kind, such as 8xH200"
            raise typer.BadParameter(message, param_hint="--gpus")
        counts.append(int(count))
        kinds |= {kind.strip()} - {""}
    if len(kinds) != 1:
        message = (
            f"of several kinds: {', '.join(sorted(kinds))}; plan one after the other" if kinds else "of which kind?"
        )
        raise typer.BadParameter(f"{gpus}: {message} (for example 8xH200)", param_hint="--gpus")
    return kinds.pop(), counts


def print_estimate(found: StageEstimate) -> None:
    """Print the estimate of a stage in one process."""
    learns = "" if found.trained == found.parameters else f", of which {_count(found.trained)} learn"
    print_line(
        f"stage {found.stage}: {_count(found.parameters)} parameters{learns}; estimated for one process on "
        f"{found.device} in {found.precision}, for prompts of {found.prompt_tokens} and completions of "
        f"{found.mean_tokens:g} tokens; nothing was loaded"
    )
    if found.chosen:
        from rollmill.orchestrator.memory_choice import describe_values

        print_line(f"chosen: {describe_values(found.chosen)}")
    rows = [[phase, *_row(memory), _gb(found.least[phase].total)] for phase, memory in found.memory.items()]
    print_table("Memory in GB", ["phase", "takes", "of which", "with offloading"], rows)
    print_table("Seconds of a step", ["phase", "seconds"], [[name, each] for name, each in found.seconds.items()])
    for problem in found.too_large:
        print_line(f"does not fit: {problem}; or GPUs: plan --gpus 8xH200")


def _count(parameters: int) -> str:
    """A number of parameters in the usual unit."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def print_clusters(kind: str, plans: list[ClusterPlan]) -> None:
    """Print the plans of a run's stages on GPUs of a kind."""
    header = ["stage", "GPUs", "trainer", "explorers", "steps/s", "tokens/s", "trainer waits", "limited by"]
    header += ["GB of a trainer's GPU", "of an explorer's"]
    rows = [
        [
            each.stage,
            each.gpus,
            each.trainer_ranks,
            f"{each.explorers} x {each.gpus_of_explorer}",
            each.steps_per_s,
            each.tokens_per_s,
            f"{100 * each.waits:.0f} %",
            each.bottleneck,
            _gb(each.trainer_memory),
            _gb(each.explorer_memory),
        ]
        for each in plans
    ]
    print_table(f"Estimates for GPUs of kind {kind}, max_staleness {plans[0].max_staleness}", header, rows)
    for each in plans:
        if each.too_large:
            print_line(f"does not fit: a trainer on {each.trainer_ranks} of {each.gpus} GPUs; give it more, or a LoRA")


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
