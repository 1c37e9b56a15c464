"""`rollmill bench`: compare checkpoints and models on held-out tasks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.errors import ConfigError
from rollmill.startup import quick_imports

if TYPE_CHECKING:
    from rollmill.orchestrator.bench_results import Results

RESULTS = Path("bench-results")


def command(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|MODEL|FILE...", help="Run directories, model folders, and files with an endpoint."),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Run file with the `evaluation` (default: that of the first run)."),
    ] = None,
    step: Annotated[str, typer.Option(help="Checkpoints of runs: last, best, all, or 100,200.")] = "last",
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per task (default: as in the file).")] = None,
    k: Annotated[str | None, typer.Option(help="Measure pass@K for these K, such as 1,4,8.")] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the results; existing results are not evaluated again.")
    ] = (RESULTS),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results and comparisons as JSON.")] = False,
) -> None:
    """Evaluate every model on every set of held-out tasks, print a table, and write results and a report to a folder.

    All models answer the same tasks with the same seeds. If started again with the same folder, it continues.
    """
    from rollmill.cli.printing import print_json
    from rollmill.files import atomic_write, to_jsonable
    from rollmill.plugins import call_hook

    with quick_imports():
        from rollmill.orchestrator.bench import bench, settings_of
        from rollmill.orchestrator.eval_targets import find_eval_targets

    chosen = find_eval_targets(models, step)
    loaded, stage = settings_of(config, chosen, overrides or [], samples, _numbers(k))
    results = bench(loaded, stage, chosen, out, lambda text: print(text, file=sys.stderr))
    found = to_jsonable(results.to_json())
    atomic_write(out / "results.json", (json.dumps(found, allow_nan=False) + "\n").encode())
    atomic_write(out / "results.csv", results.to_csv().encode())
    call_hook("write_bench_report", out, found["results"], found["comparisons"])
    if as_json:
        print_json({key: found[key] for key in ("results", "comparisons")})
        return
    _print(results)
    print(f"{out}/bench.html, results.json, results.csv")


def _numbers(text: str | None) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if any(each < 1 for each in found):
        raise ConfigError(f"--k {text}: expected numbers of samples, such as 1,4,8")
    return found


def _print(results: Results) -> None:
    from rollmill.cli.printing import print_table

    shown = {
        (cell.subject.label, cell.result.name, measure): f"{each.value:.3f} ({each.low:.3f} to {each.high:.3f})"
        for cell, measure, each in results.rows()
    }
    measures = list(dict.fromkeys(measure for _, _, measure in shown))
    cells = list(dict.fromkeys((label, name) for label, name, _ in shown))
    rows = [[label, name or "-", *(shown.get((label, name, each)) for each in measures)] for label, name in cells]
    print_table("", ["model", "set", *measures], rows)
    main: dict[str, str] = {}  # main measure of each set: `sampled`, if it exists
    for cell, measure, _ in results.rows():
        if measure == "sampled" or cell.result.name not in main:
            main[cell.result.name] = measure
    differences = [
        [
            each.set or "-",
            each.measure,
            f"{each.one} -> {each.other}",
            f"{each.difference.value:+.3f} ({each.difference.low:+.3f} to {each.difference.high:+.3f})",
            f"{each.difference.p:.3g}",
        ]
        for each in results.comparisons
        if each.one == results.cells[0].subject.label and each.measure == main[each.set]
    ]
    if differences:
        print_table("differences on the same tasks", ["set", "measure", "models", "difference", "p"], differences)
