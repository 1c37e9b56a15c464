"""Mutation testing: share of small code changes that tests detect, `python -m bench mutation [--module PATH ...]`.

Each mutant is one change (see `mutants.py`). It is killed if a test that runs the changed line fails or times out.
`accepted.toml` lists equivalent mutants and accepted survivors, each with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench import machine
from bench.harness import RESULTS, ROOT, BenchError, import_path, note
from bench.worker import versions

#: Modules, and the tests that have to detect a change in them: fast tests of the module rather than of a whole run. A
#: module belongs to the first pattern that matches.
AREAS: dict[str, tuple[str, ...]] = {
    "src/rollmill/algorithms/[bpr]*.py": (  # binding and recipes: what the keys of a run file turn into
        "tests/algorithms/*.py",
        "tests/trainer/test_formulas.py",
        "tests/trainer/test_kto.py",
        "tests/trainer/test_masks.py",
        "tests/trainer/test_self_distillation.py",
        "tests/algorithms/test_user.py",
        "tests/trainer/test_kl.py",
        "tests/trainer/test_distillation.py",
    ),
    "src/rollmill/algorithms/*.py": ("tests/algorithms/*.py",),
    "src/rollmill/trainer/loss.py": (
        "tests/trainer/test_objective.py",
        "tests/trainer/test_step.py",
        "tests/trainer/test_kl.py",
        "tests/trainer/test_masks.py",
        "tests/trainer/test_self_distillation.py",
        "tests/trainer/test_formulas.py",
        "tests/trainer/test_domains.py",
    ),
    "src/rollmill/trainer/batch.py": (
        "tests/trainer/test_batch.py",
        "tests/trainer/test_packing*.py",
        "tests/trainer/test_domains.py",
    ),
    "src/rollmill/rollout/recorder.py": ("tests/rollout/test_recording.py",),
    "src/rollmill/buffer/group_queue.py": ("tests/buffer/test_queue.py",),
    "src/rollmill/models/recurrent_functions.py": ("tests/models/test_recurrent_functions.py",),
    "src/rollmill/models/routing.py": ("tests/models/test_routing.py",),
    "src/rollmill/rewards/judges/parsing.py": ("tests/rewards/test_judges_verdict.py",),
    "src/rollmill/orchestrator/pacing.py": ("tests/orchestrator/test_pacing.py",),
}
ACCEPTED = Path(__file__).with_name("accepted.toml")
TARGET = 0.95


def main(arguments: list[str], only_json: bool) -> int:
    """Run the benchmark. Exit code 1 if a module misses the target, or `accepted.toml` has outdated entries."""
    parser = argparse.ArgumentParser(prog="bench mutation", description=__doc__)
    parser.add_argument("--module", action="append", default=[], metavar="PATTERN", help="only these (repeatable)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--budget-s", type=float, default=20, help="seconds of tests (unchanged) per mutant")
    parser.add_argument("--again", action="store_true", help="only those that survived in the last result")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose function and change has TEXT")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where mutation.json is written")
    parser.add_argument("--log", type=Path, help="a line of JSON for every mutant")
    args = parser.parse_args(arguments)
    before = _earlier(args.folder / "mutation.json")
    left = [each["key"] for row in before.values() for each in row["survivors"]] if args.again else None
    rows, wrong = dict[str, Any](), list[str]()
    for modules, tests in _areas(args.module):
        note(f"  {', '.join(modules)}")
        spec = {"modules": modules, "tests": tests, "jobs": args.jobs, "budget_s": args.budget_s}
        found = list(_tried(spec | {"only": args.only, "again": left}, args.log))
        wrong += _apply_accepted(found)
        rows |= _rows(found, before if args.again else {})
        if not args.only:
            _write(args.folder, before | rows)
    if not rows:
        raise BenchError(f"no mutants of {', '.join(args.module) or 'any module'}")
    if not only_json:
        print(_table(rows))
    for each in wrong:
        note(f"  accepted.toml: {each}")
    killed, counted = (sum(row[key] for row in rows.values()) for key in ("killed", "counted"))
    print(json.dumps({"bench": "mutation", "killed": killed, "of": counted, "share": round(killed / counted, 4)}))
    return int(bool(wrong) or any(row["killed"] < TARGET * row["counted"] for row in rows.values()))


def _tried(spec: dict[str, Any], log: Path | None) -> Iterator[dict[str, Any]]:
    """Run the mutants and yield their results; prints survivors immediately."""
    for line in _worked(spec):
        if "tests" in line:
            note(f"  {line['tests']} tests reach them ({line['seconds']:.0f} s)")
            if line["failed"]:
                raise BenchError(f"tests that fail without any change: {', '.join(line['failed'])}")
            continue
        if line["outcome"] == "broken":
            raise BenchError(f"{line['module']}:{line['line']} {line['change']} cannot be made: {line['by']}")
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if line["outcome"] == "survived":
            note(f"  {line['module']}:{line['line']} {line['function']}: {line['change']} ({line['operator']})")
        yield line


def _write(folder: Path, rows: dict[str, Any]) -> None:
    record = {
        "bench": "mutation",
        "machine": machine.describe(),
        "versions": versions("torch", "pytest", "hypothesis"),
        "modules": dict(sorted(rows.items())),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutation.json").write_text(json.dumps(record, indent=1) + "\n")


def _areas(patterns: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield groups of modules with the same tests, and these tests."""
    taken: set[str] = set()
    for area, tests in AREAS.items():
        modules = [module for module in _files(area) if module not in taken]
        taken.update(modules)
        chosen = [m for m in modules if not patterns or any(fnmatch(m, f"*{pattern}*") for pattern in patterns)]
        if chosen:
            yield chosen, [file for test in tests for file in _files(test) if Path(file).name.startswith("test_")]


def _files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def _worked(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the worker and yield its messages."""
    plain = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "PYTHONPATH": import_path()}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.mutation.worker", json.dumps(spec)],
            cwd=ROOT,
            env={**os.environ, **plain},
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        finally:
            process.kill() if process.poll() is None and sys.exc_info()[0] else process.wait()
        if process.returncode not in (0, 5):
            log.seek(0)
            tail = "\n".join(log.read().decode(errors="replace").splitlines()[-15:])
            raise BenchError(f"the worker ended with exit code {process.returncode}:\n{tail}")


def _apply_accepted(found: list[dict[str, Any]]) -> list[str]:
    """Add the reason to mutants that `accepted.toml` lists; returns its outdated entries."""
    listed = tomllib.loads(ACCEPTED.read_text()).get("mutant", [])
    modules, wrong = {each["module"] for each in found}, []
    for entry in listed:
        module = f"src/rollmill/{entry['module']}"
        if module not in modules:
            continue
        for change in entry["changes"]:
            key = [module, entry["function"], entry["line"], change]
            same = [each for each in found if _key(each)[:-1] == key]
            left = [each for each in same if each["outcome"] == "survived"]
            for each in left:
                each["reason"], each["equivalent"] = entry["reason"], entry.get("equivalent", False)
            if not left:
                by = f"is killed by {same[0]['by']}" if same else "is no mutant any more"
                wrong.append(f"{entry['module']} {entry['function']}: {change!r} {by}; take it out")
    return wrong


def _earlier(path: Path) -> dict[str, Any]:
    """The last result of every module that still exists."""
    modules = json.loads(path.read_text())["modules"] if path.exists() else {}
    return {module: row for module, row in modules.items() if (ROOT / module).exists()}


def _rows(found: list[dict[str, Any]], earlier: dict[str, Any]) -> dict[str, Any]:
    """The result of each module; `earlier` has modules of which only the survivors were run again."""
    rows: dict[str, Any] = {}
    for module in dict.fromkeys(each["module"] for each in found):
        own = [each for each in found if each["module"] == module]
        survived = [each for each in own if each["outcome"] == "survived"]
        equivalent = [each for each in survived if each.get("equivalent")]
        killed = len(own) - len(survived) + earlier.get(module, {}).get("killed", 0)
        rows[module] = {
            "mutants": killed + len(survived),
            "equivalent": len(equivalent),
            "counted": killed + len(survived) - len(equivalent),
            "killed": killed,
            "survived": len(survived) - len(equivalent),
            "survivors": [
                {
                    "at": f"{module}:{each['line']}",
                    "change": each["change"],
                    "equivalent": bool(each.get("equivalent")),
                    "reason": each.get("reason", each["by"] or "no test notices it"),
                    "key": _key(each),
                }
                for each in survived
            ],
        }
    return rows


def _key(mutant: dict[str, Any]) -> list[Any]:
    """Identity of a mutant, which does not change when lines move."""
    return [mutant[name] for name in ("module", "function", "code", "change", "nth")]


def _table(modules: dict[str, Any]) -> str:
    keys = ("mutants", "equivalent", "killed", "survived")
    total = {key: sum(row[key] for row in modules.values()) for key in (*keys, "counted")}
    rows: list[tuple[str, ...]] = [("module", *keys, "share killed")]
    for name, row in [*modules.items(), ("all", total)]:
        share = f"{row['killed'] / row['counted']:.1%}" if row["counted"] else "-"
        rows.append((name.removeprefix("src/rollmill/"), *(str(row[key]) for key in keys), share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
