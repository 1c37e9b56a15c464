"""`rollmill audit`: test tasks, rewards and environments before training."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from rollmill.errors import ConfigError
from rollmill.startup import quick_imports

if TYPE_CHECKING:
    from rollmill.apps.audit.findings import Finding
    from rollmill.config.loader import LoadedRun

_COLOURS = {"ok": "green", "skipped": "bright_black", "warning": "yellow", "problem": "red"}


def command(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="A run file, or a task file (with --reward).")],
    reward: Annotated[
        str | None, typer.Option("--reward", help="A built-in reward, or FILE.py:NAME; only with a task file.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="A key of --reward (repeatable).")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Layout of the task file, such as gsm8k.")] = None,
    stage: Annotated[str | None, typer.Option(help="Stage to audit (default: the first that rolls out).")] = None,
    count: Annotated[int, typer.Option("--tasks", min=1, help="Maximum number of tasks to test.")] = 100,
    full: Annotated[
        float | None, typer.Option(help="Reward of a right completion (default: evaluation.threshold, else 1).")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Format of right completions, such as '<answer>{answer}</answer>'.")
    ] = None,
    oracle: Annotated[
        str | None,
        typer.Option(help="FILE.py:NAME: (task) -> right completion; for environments (task, seen, turn) -> action."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Completions per task to sample from the run's model.")] = 0,
    scores: Annotated[Path | None, typer.Option(help="File of `rollmill tasks score`, for solvability.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
) -> None:
    """Test tasks and rewards with policies that know the answer, know nothing, or cheat. Exit code 1 if a problem is
    found."""
    from rollmill.cli.printing import print_json

    with quick_imports():
        from rollmill.apps.audit.runner import AuditOptions, audit_exit_code, run_audit
        from rollmill.orchestrator.task_difficulty import find_stage
    from rollmill.registry import import_object

    loaded = _loaded(tasks, reward, option or [], preset, overrides or [])
    options = AuditOptions(
        tasks=count,
        full=full,
        template=template,
        oracle=None if oracle is None else import_object(oracle),
        samples=samples,
        scores=scores,
    )
    findings = run_audit(loaded, find_stage(loaded, stage), options, lambda text: print(text, file=sys.stderr))
    if as_json:
        print_json(
            {"findings": [each.to_json() for each in findings], "failed": bool(audit_exit_code(findings, strict))}
        )
    else:
        _print(findings)
    raise typer.Exit(audit_exit_code(findings, strict))


def _loaded(tasks: Path, reward: str | None, options: list[str], preset: str | None, overrides: list[str]) -> LoadedRun:
    from rollmill.cli.grade import parse_reward_config
    from rollmill.config.loader import load_taskset_run

    if not tasks.is_file():
        raise ConfigError(f"{tasks} does not exist; give a run file, or a file of tasks")
    if tasks.suffix in (".yaml", ".yml"):
        if reward is not None or options or preset is not None:
            raise ConfigError("--reward, --option and --preset apply to a file of tasks; a run file has its own")
        return load_taskset_run(tasks, overrides)
    if reward is None:
        raise ConfigError(f"{tasks} is not a run file (.yaml); give --reward NAME with a file of tasks")
    taskset = {"path": str(tasks.absolute())} | ({} if preset is None else {"preset": preset})
    rewards: list[Any] = [parse_reward_config(reward, options).model_dump(mode="json", exclude_defaults=True)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "audit.yaml"
        file.write_text(yaml.safe_dump({"taskset": taskset, "rewards": rewards}))
        return load_taskset_run(file, overrides)


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from rollmill.cli.printing import print_line

    for each in findings:
        line = Text(f"{each.severity:8} ", style=_COLOURS[each.severity])
        line.append(f"{each.check:24} ", style="bold").append(each.text, style="default")
        print_line(line)
        if each.advice:
            print_line(f"{'':33} -> {each.advice}")
    counts = Counter(str(each.severity) for each in findings)
    print_line(", ".join(f"{counts[name]} {name}" for name in ("problem", "warning", "ok", "skipped") if counts[name]))
