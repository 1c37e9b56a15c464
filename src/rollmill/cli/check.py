"""`rollmill check`: resolve a run file, count its tasks and print the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.printing import print_json, print_line, print_table
from rollmill.config.checks.engine import uses_engine
from rollmill.config.checks.extras import find_missing_extras
from rollmill.config.checks.modes import RUN_MODES, iter_cells, refusal_reasons
from rollmill.config.checks.pictures import both_ways, vision_model_name, vision_model_type
from rollmill.config.checks.warnings import find_warnings
from rollmill.config.describe import TaskCount, describe_run, estimate_parameters, evaluation_key
from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.placement import RayPlacement
from rollmill.config.taskset import TasksetConfig
from rollmill.errors import ConfigError, TasksetError
from rollmill.rewards.builtin.python import PythonReward
from rollmill.startup import quick_imports

if TYPE_CHECKING:
    from rollmill.data import Taskset
    from rollmill.types import Message


def command(
    config: Annotated[Path | None, typer.Argument(help="Run file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value (repeatable).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run directory. Default: runs/NAME.")] = None,
    data: Annotated[
        bool, typer.Option("--data/--no-data", help="Load tasksets, reward functions and trackers.")
    ] = True,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Only compare engine and trainer with transformers for this checkpoint folder."),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Print which features work in which mode, and why others are refused.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved run (or the matrix) as JSON.")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the resolved run file.")] = False,
) -> None:
    """Resolve and check a run file, and print the run."""
    if as_json and as_yaml:
        raise ConfigError("give --json or --yaml, not both")
    if (config is not None) + (model is not None) + matrix != 1:
        raise ConfigError("give a run file, or --model with the folder of a checkpoint, or --matrix")
    if matrix:
        _print_matrix(as_json)
        return
    if model is not None:
        _check_model(model, as_json)
        return
    assert config is not None
    run = load_run(config, overrides or [], out, require_files=data)
    missing = find_missing_extras(run)
    if missing and data:
        raise ConfigError("\n".join(f"{config}: {each}" for each in missing))
    if data:
        _check_engines(run)
        _check_containers(run)
    tasksets = load_tasksets(run) if data else {}
    counts = _counted(run, tasksets)
    if data:
        _check_chats(run, tasksets)
        _check_adapters(run)
    warnings = [*missing, *find_warnings(run, {key: _longest_prompt(each) for key, each in tasksets.items()})]
    if as_json:
        print(json.dumps(_answer(run, counts) | {"warnings": warnings}, indent=2, ensure_ascii=False))
        return
    print(run.to_yaml() if as_yaml else describe_run(run, counts), end="" if as_yaml else "\n")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _check_engines(run: LoadedRun) -> None:
    """Look into the environment of vLLM, where it is to run a vision-language model.

    Raises ConfigError if it lacks what that needs, or cannot be used.
    """
    kind, placement = vision_model_type(run.config.model), run.config.placement
    if kind is None:
        return
    engines = [stage.engine for stage in run.stages if uses_engine(stage)]
    engines += (
        [each.engine for each in placement.explorers if each.engine] if isinstance(placement, RayPlacement) else []
    )
    with quick_imports():
        from rollmill.engines.vllm.process import probe_python, require_torchvision

    for python in dict.fromkeys(each.reader_python() for each in engines):
        if python is not None:
            require_torchvision(kind, python, probe_python(python))


def _check_containers(run: LoadedRun) -> None:
    """Look for the engine of every environment with containers. Raises ConfigError with the remedy if there is none."""
    from rollmill.rollout.containers.engine import ContainerEngine
    from rollmill.rollout.environments.builtin.container import ContainerEnvironment

    sections = [each for stage in run.stages for _, each in stage.walk() if isinstance(each, ContainerEnvironment)]
    for engine, runtime in dict.fromkeys((each.engine, each.runtime) for each in sections):
        ContainerEngine(engine, runtime)


def _print_matrix(as_json: bool) -> None:
    """Print the features in every mode: `works`, or the letter of the reason why not."""
    cells = list(iter_cells())
    if as_json:
        print_json(
            [
                {"feature": each.feature.title, "key": each.feature.key or None, "place": each.mode.deployment}
                | {"engine": each.mode.engine, "test": each.test, "refused": each.reason}
                for each in cells
            ]
        )
        return
    reasons = refusal_reasons()
    header = ("feature", *(f"{mode.deployment}, {mode.engine}" for mode in RUN_MODES))
    rows = []
    for start in range(0, len(cells), len(RUN_MODES)):
        row = cells[start : start + len(RUN_MODES)]
        rows.append([row[0].feature.title, *(reasons[each.reason] if each.reason else "works" for each in row)])
    print_table("features in every mode", header, rows)
    for reason, letter in reasons.items():
        print_line(f"{letter}: {reason}")


def _check_model(folder: Path, as_json: bool) -> None:
    """Print how far engine and trainer deviate from the model's own forward pass.

    Raises:
        ModelError: the folder cannot be loaded, or a deviation is larger than rounding explains.
    """
    from rollmill.config.model import ModelConfig

    with quick_imports():
        import torch

        from rollmill.engines.native.parity_check import parity_error
        from rollmill.models.load import load_policy
        from rollmill.trainer.parity import check_parity

    policy = load_policy(ModelConfig(path=folder), texts=[], seed=0, device=torch.device("cpu"), pictures=True)
    gaps = check_parity(policy.model, folder)
    if as_json:
        found = [{"compared": g.path, "gap": g.value, "tolerance": g.tolerance, "layer": g.layer or None} for g in gaps]
        print_json({"model": type(policy.model).__name__, "right": all(g.right for g in gaps), "gaps": found})
    else:
        header = ("compared with transformers", "gap", "tolerance", "verdict", "first layer that differs")
        rows = [
            [g.path, f"{g.value:.1e}", f"{g.tolerance:.0e}", "right" if g.right else "WRONG", g.layer] for g in gaps
        ]
        print_table(f"{type(policy.model).__name__} in {folder}", header, rows)
    if wrong := [gap for gap in gaps if not gap.right]:
        raise parity_error(folder, policy.model, wrong)


def _longest_prompt(taskset: Taskset) -> int:
    """Return the characters of the longest prompt, without what a chat template adds."""
    return max((len(_prompt_text(task.prompt)) for task in taskset.tasks), default=0)


def _prompt_text(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(text for message in prompt if isinstance(text := message.get("content"), str))


def load_tasksets(run: LoadedRun) -> dict[tuple[str, str], Taskset]:
    """Import reward functions and load every taskset, by stage and section.

    Raises ConfigError naming the stage if something cannot be loaded, or a reference is empty.
    """
    from rollmill.config.checks.conflicts import require_workflows
    from rollmill.data.images import require_seen
    from rollmill.rewards.builtin.python import load_reward_function
    from rollmill.rewards.references import require_references, require_verdicts

    found: dict[tuple[str, str], Taskset] = {}
    loaded: dict[str, Taskset] = {}
    for stage in run.stages:
        judged = {
            f"domains.{name}.taskset" if name else "taskset": (view.taskset, view)
            for name, view in stage.by_domain().items()
        }
        for name, held_out in (stage.evaluation.all_sets() if stage.evaluation else {}).items():
            judged[evaluation_key(name)] = (held_out.taskset, stage.for_evaluation(held_out))
        for _, view in judged.values():
            for reward in view.rewards:
                if isinstance(reward, PythonReward):
                    load_reward_function(reward)
        for section, (taskset, view) in judged.items():
            if taskset is not None:
                key = taskset.model_dump_json()
                where = f"stage {stage.name}: {section}"
                loaded[key] = loaded.get(key) or _loaded(taskset, where)
                sees, single = vision_model_name(run.config.model) is not None, both_ways(run.config.model) == "prompt"
                require_seen(taskset, loaded[key].tasks, sees, where, single_prompt=single)
                require_references(view.rewards, loaded[key].tasks, where)
                require_verdicts(view.rewards, view.reward_settings, loaded[key].tasks, where)
                require_workflows(view, loaded[key].tasks, where)
                if section == "taskset":
                    _check_switches(loaded[key], view.rollout.chat_template_kwargs, where)
                found[stage.name, section] = loaded[key]
    return found


def _counted(run: LoadedRun, tasksets: dict[tuple[str, str], Taskset]) -> dict[tuple[str, str], TaskCount]:
    """Count the tasks that every stage uses, and what it leaves out.

    Raises ConfigError naming the stage if nothing is left to learn from.
    """
    if not tasksets:
        return {}
    from rollmill.data.examples import count_tasks, require_examples, select_context, select_examples

    found: dict[tuple[str, str], TaskCount] = {}
    for stage in run.stages:
        for (name, section), taskset in tasksets.items():
            if name != stage.name:
                continue
            if section.startswith("evaluation"):
                found[name, section] = TaskCount(len(taskset.tasks), taskset.left_out())
                continue
            try:
                examples = select_examples(stage, taskset)
                if section == "taskset":
                    require_examples(stage, taskset, examples)
                if stage.algorithm.self_teacher is not None:
                    taskset = select_context(taskset, stage.algorithm.self_teacher, stage.required_taskset, [])
            except TasksetError as error:
                raise ConfigError(f"stage {name}: {section}: {error}") from error
            found[name, section] = count_tasks(stage, taskset, examples)
    return found


def _check_switches(taskset: Taskset, switches: dict[str, Any], where: str) -> None:
    """Raise ConfigError if the stage has variables of the chat template, and the taskset no chats."""
    from rollmill.data.taskset import with_switches

    try:
        with_switches(taskset.tasks, switches, "rollout.chat_template_kwargs", taskset.name)
    except TasksetError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_chats(run: LoadedRun, tasksets: dict[tuple[str, str], Taskset]) -> None:
    """Render chats with the checkpoint's chat template, as the run will, one of each kind.

    Raises ConfigError naming the stage, the section and the task if the template cannot show one, or not so that it
    could be trained.
    """
    folder, pictures = run.config.model.path, vision_model_name(run.config.model) is not None
    chats = any(not isinstance(task.prompt, str) for taskset in tasksets.values() for task in taskset.tasks)
    if not isinstance(folder, Path) or pictures or not chats:
        return
    with quick_imports():
        from rollmill.data.chat_check import check_chats
        from rollmill.data.taskset import with_switches
        from rollmill.models.load import read_tokenizer_and_context
    tokenizer, _ = read_tokenizer_and_context(folder, trust=run.config.model.trust_remote_code)
    stages = {stage.name: stage for stage in run.stages}
    for (name, section), taskset in tasksets.items():
        stage, held_out = stages[name], section.startswith("evaluation")
        if all(isinstance(task.prompt, str) for task in taskset.tasks):
            continue
        tasks = with_switches(taskset.tasks, stage.rollout.chat_template_kwargs, "rollout", taskset.name)
        try:
            check_chats(
                tasks,
                tokenizer,
                rolled_out=held_out or stage.algorithm.uses_rollouts,
                imitated=stage.algorithm.uses_examples and not held_out,
                learn=stage.offline_data.learn,
            )
        except TasksetError as error:
            raise ConfigError(f"stage {name}: {section}: {error}") from error


def _check_adapters(run: LoadedRun) -> None:
    """Add the adapters to the checkpoint's model without its weights. Raises ModelError if they do not fit."""
    config = run.config.model
    if config.lora is None or not isinstance(config.path, Path) or vision_model_name(config) is not None:
        return
    if not config.path.is_dir() or any(config.path.glob("*.gguf")):
        return  # a GGUF file has the model's description among its weights
    with quick_imports():
        import torch

        from rollmill.models.load import build_meta_model
        from rollmill.models.lora import add_lora
    model = build_meta_model(config.path, trust=config.trust_remote_code)
    with torch.device("meta"):
        add_lora(model, config.lora, seed=0)


def _loaded(taskset: TasksetConfig, where: str) -> Taskset:
    from rollmill.data import load_taskset

    try:
        return load_taskset(taskset)
    except TasksetError as error:
        raise ConfigError(f"{where}: {error}") from error


def _answer(run: LoadedRun, counts: dict[tuple[str, str], TaskCount]) -> dict[str, object]:
    new = run.config.model.new if run.config.model.path == "new" else None
    return {
        "path": str(run.path),
        "out": str(run.out),
        "config": run.resolved(),
        "parameters": estimate_parameters(new) if new else None,
        "tasks": [
            {"stage": stage, "section": section, **_count_json(count)}
            | ({} if count.examples is None else {"examples": _count_json(count.examples)})
            for (stage, section), count in counts.items()
        ],
    }


def _count_json(count: TaskCount) -> dict[str, object]:
    return {"tasks": count.tasks, "rejected": sum(count.left_out.values()), "left_out": dict(count.left_out)}
