"""`rollmill run`, `rollmill resume` and `rollmill eval`: a run from its file, from a checkpoint, or only measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from rollmill.cli.printing import print_summary, progress_view
from rollmill.errors import ConfigError
from rollmill.startup import quick_imports

if TYPE_CHECKING:
    from rollmill.config.loader import LoadedRun
    from rollmill.config.supervision import SupervisionConfig
    from rollmill.supervision.attempt import RunAttempt


def run(
    config: Annotated[Path, typer.Argument(help="The run file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example trainer.lr=1e-4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory (default: runs/NAME).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json at the end.")] = False,
) -> None:
    """Run a run file: roll out, score, train, evaluate and report, or as its `mode` says."""
    from rollmill.config.loader import load_run, load_supervision

    def train(attempt: RunAttempt) -> dict[str, Any]:
        with quick_imports():
            from rollmill import launch

        if attempt.run_dir is not None:
            return launch.resume(attempt.run_dir, progress_view(as_json), attempt=attempt)
        return launch.start(load_run(config, overrides or [], out), out, progress_view(as_json), attempt=attempt)

    if (summary := run_supervised(load_supervision(config, overrides or []), train, as_json)) is not None:
        print_summary(summary, as_json)
        return
    loaded = load_run(config, overrides or [], out)
    match loaded.config.mode:
        case "bench":
            _bench(loaded, overrides or [], out, as_json)
        case "serve":
            _serve(loaded, overrides or [], out, as_json)
        case "explore":
            _explore(loaded, as_json)
        case _:
            with quick_imports():
                from rollmill.launch import start

            print_summary(start(loaded, out, progress_view(as_json)), as_json)


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting from here on, for example steps=200."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json at the end.")] = False,
) -> None:
    """Resume an interrupted or killed run from its newest checkpoint, or extend a finished one by --set steps=N."""
    from rollmill.config.loader import load_supervision

    if overrides:
        from rollmill.orchestrator.extension import change_settings

        for change in change_settings(run_dir, overrides):
            _say_on(sys.stderr if as_json else sys.stdout)(f"changed: {change}")

    def train(attempt: RunAttempt | None) -> dict[str, Any]:
        with quick_imports():
            from rollmill import launch

        return launch.resume(run_dir, progress_view(as_json), attempt=attempt)

    summary = run_supervised(load_supervision(run_dir / "config.yaml"), train, as_json)
    print_summary(train(None) if summary is None else summary, as_json)


def evaluate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint (default: the newest).")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example evaluation.samples=4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a checkpoint on the run's held-out tasks."""
    with quick_imports():
        from rollmill import launch

    metrics = launch.evaluate(run_dir, step, overrides or [])
    if as_json:
        print(json.dumps(metrics))
        return
    for name, value in metrics.items():
        print(f"{name:20} {value:.4f}" if isinstance(value, float) else f"{name:20} {value}")


def run_supervised(
    config: SupervisionConfig | None, train: Callable[[RunAttempt], dict[str, Any]], as_json: bool
) -> dict[str, Any] | None:
    """Train in child processes, and return the summary; None if this process has to train itself."""
    if config is None:
        return None
    from rollmill.supervision.supervisor import RunSupervisor, can_supervise

    if not can_supervise(config):
        return None
    return RunSupervisor(config, train, _say_on(sys.stderr if as_json else sys.stdout)).run()


def _say_on(stream: TextIO) -> Callable[[str], None]:
    from rollmill.trackers.console import print_or_drop

    def say(text: str) -> None:
        print_or_drop(text, stream)

    return say


def _explore(loaded: LoadedRun, as_json: bool) -> None:
    """Join the run in --out as an explorer, or fill its buffer alone."""
    say = _say_on(sys.stderr if as_json else sys.stdout)
    with quick_imports():
        from rollmill.orchestrator.exploring import explore_alone
        from rollmill.remote.explorer_process import run_explorer

    explore = run_explorer if loaded.config.await_trainer else explore_alone
    made = explore(loaded, loaded.out, say)
    if as_json:
        print(json.dumps(made))


def _bench(loaded: LoadedRun, overrides: list[str], out: Path | None, as_json: bool) -> None:
    """Run `rollmill bench MODEL --config FILE`."""
    from rollmill.cli import bench

    assert isinstance(loaded.config.model.path, Path)
    folder = out or bench.RESULTS
    bench.command([loaded.config.model.path], loaded.path, out=folder, overrides=overrides, as_json=as_json)


def _serve(loaded: LoadedRun, overrides: list[str], out: Path | None, as_json: bool) -> None:
    """Run `rollmill serve MODEL`, or `rollmill serve FILE --train` if applications make the rollouts."""
    from rollmill.config.workflows import LiveRequestsWorkflow
    from rollmill.plugins import find_application

    if as_json:
        raise ConfigError("--json: mode `serve` prints no result; leave it out")
    serve = find_application("COMMANDS", "serve")
    if serve is None:
        raise ConfigError("mode `serve`: this installation of rollmill has no `rollmill serve` (rollmill.apps.serve)")
    if any(isinstance(stage.workflow, LiveRequestsWorkflow) for stage in loaded.stages):
        serve(loaded.path, train=True, overrides=overrides, out=out)
        return
    if out is not None:
        raise ConfigError(
            "--out: mode `serve` writes no run directory, unless it trains on `live_requests`; leave it out"
        )
    assert isinstance(loaded.config.model.path, Path)
    threads = None if loaded.config.threads == "auto" else loaded.config.threads
    serve(loaded.config.model.path, threads=threads, device=loaded.config.device)
