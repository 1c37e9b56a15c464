"""Mutation testing with mutmut: share of small code changes that tests detect, `python -m bench mutation`.

mutmut rewrites a module so that each function can be switched to one of its mutants, and forks for every mutant to run
the tests that call the function. This file chooses modules and tests, and counts. `mutation.toml` lists mutants that
change nothing, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from bench import machine
from bench.harness import RESULTS, ROOT, BenchError, import_path, need, note
from bench.worker import versions

#: Modules, and the tests that have to detect a change in them: fast tests of the module rather than of a whole run. A
#: module belongs to the first pattern that matches.
AREAS: dict[str, tuple[str, ...]] = {
    "src/rollmill/algorithms/[bipr]*.py": (  # binding and recipes: what the keys of a run file turn into
        "tests/algorithms/test_*.py",
        "tests/trainer/test_formulas.py",
        "tests/trainer/test_kto.py",
        "tests/trainer/test_masks.py",
        "tests/trainer/test_self_distillation.py",
        "tests/trainer/test_kl.py",
        "tests/trainer/test_distillation.py",
    ),
    "src/rollmill/algorithms/*.py": ("tests/algorithms/test_*.py",),
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
ACCEPTED = Path(__file__).with_suffix(".toml")
#: Where mutmut works, a folder for each area; `mutmut show`, `mutmut browse` and `mutmut run NAME` go on from there.
BUILD = ROOT / "build" / "mutation"
SETTINGS: dict[str, Any] = {
    "source_paths": ["src"],
    "do_not_mutate_patterns": [r"^\s*raise ", r"^\s*assert "],  # texts of errors
    "timeout_multiplier": 5.0,  # of the tests' time and a second; many mutants of a queue wait for ever
    "pytest_add_cli_args": [
        *("-m", "not slow and not gpu and not service", "--assert=plain", "-o", "timeout=0"),
        *(word for name in ("cacheprovider", "xdist", "faulthandler") for word in ("-p", f"no:{name}")),
        # in processes of its own, which know nothing of mutmut
        *("--deselect", "tests/algorithms/test_user.py::test_a_run_with_a_plugin_trains_and_resumes"),
    ],
}
#: Arguments without effect on one device and for equal lengths: a mutant that differs in them alone does not count.
WITHOUT_EFFECT = re.compile(r"(, )?\b(strict|device)=[\w.]+")
#: Exit codes of pytest as mutmut keeps them.
SURVIVED, UNTESTED, UNFINISHED = 0, (5, 33), (2, 35)
TARGET = 0.95
T = TypeVar("T", str, list[str])


def main(arguments: list[str], only_json: bool) -> int:
    """Run the benchmark. Exit code 1 if a module misses the target, or `mutation.toml` has outdated entries."""
    parser = argparse.ArgumentParser(prog="bench mutation", description=__doc__)
    parser.add_argument("--module", action="append", default=[], metavar="PATTERN", help="only these (repeatable)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where mutation.json is written")
    args = parser.parse_args(arguments)
    need("mutmut", "pip install 'rollmill[bench]'")
    path = args.folder / "mutation.json"
    earlier = json.loads(path.read_text())["modules"] if path.exists() else {}
    kept = {module: row for module, row in earlier.items() if (ROOT / module).exists()}
    listed = tomllib.loads(ACCEPTED.read_text())
    rows, outdated = dict[str, Any](), False
    for modules, tests in _areas(args.module):
        folder = BUILD / Path(modules[0]).stem
        _run(folder, modules, tests, args.jobs)
        for module in modules:
            if not (mutants := list(counted_mutants(folder, module))):
                continue  # a module of declarations
            equivalent = listed.get(module, {})
            rows[module] = row = row_of(mutants, equivalent)
            if not only_json:
                print(f"{module}: {row['killed']} of {row['counted']} killed, {row['killed'] / row['counted']:.1%}")
            survived = {each["mutant"] for each in row["survivors"]}
            for mutant in sorted(survived - set(equivalent)):
                note(f"  {mutant}")
            for mutant in sorted(set(equivalent) - survived):
                note(f"  {ACCEPTED.name}: {mutant!r} is killed, or no mutant any more; take it out")
                outdated = True
        _write(path, kept | rows)
    if not rows:
        raise BenchError(f"no mutants of {', '.join(args.module)}")
    killed, counted = (sum(row[key] for row in rows.values()) for key in ("killed", "counted"))
    print(json.dumps({"bench": "mutation", "killed": killed, "of": counted, "share": round(killed / counted, 4)}))
    return int(outdated or any(row["killed"] < TARGET * row["counted"] for row in rows.values()))


def _areas(patterns: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield groups of modules with the same tests, and these tests."""
    taken: set[str] = set()
    for area, tests in AREAS.items():
        modules = [module for module in _files(area) if module not in taken]
        taken.update(modules)
        if patterns:
            modules = [module for module in modules if any(fnmatch(module, f"*{pattern}*") for pattern in patterns)]
        if modules:
            yield modules, [file for test in tests for file in _files(test)]


def _files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def _run(folder: Path, modules: list[str], tests: list[str], jobs: int) -> None:
    """Have mutmut test all mutants of the modules, in a folder with settings of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("src", "tests"):
        (folder / name).symlink_to(ROOT / name)
    settings = {**SETTINGS, "only_mutate": modules, "pytest_add_cli_args_test_selection": tests}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]))
    plain = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "PYTHONPATH": import_path()}
    names = [module.removeprefix("src/").removesuffix(".py").replace("/", ".") + ".*" for module in modules]
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", "run", "--max-children", str(jobs)]
    path = folder / "log.txt"
    with path.open("w") as log:
        done = subprocess.run([*command, *names], cwd=folder, env=os.environ | plain, stdout=log, stderr=log)
    if done.returncode:
        tail = "\n".join(path.read_text().splitlines()[-15:])
        raise BenchError(f"mutmut ended with exit code {done.returncode}; {path}:\n{tail}")


def counted_mutants(folder: Path, module: str) -> Iterator[tuple[str, int]]:
    """Yield each mutant that differs in something that matters, as "function: old -> new", and pytest's exit code."""
    tree = ast.parse((folder / "mutants" / module).read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for key, code in json.loads((folder / "mutants" / f"{module}.meta").read_text())["exit_code_by_key"].items():
        if code in (None, *UNFINISHED):
            raise BenchError(f"mutmut did not finish {key} (code {code}): {folder / 'log.txt'}")
        mutant = key.rpartition(".")[2]
        mangled = mutant.partition("__mutmut_")[0]
        function = mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        old, new = (
            ast.unparse(functions[name]).replace(name, function).splitlines()
            for name in (f"{mangled}__mutmut_orig", mutant)
        )
        before, after = (" ".join(map(str.strip, lines)) for lines in _difference(old, new, around=0))
        if WITHOUT_EFFECT.sub("", before) != WITHOUT_EFFECT.sub("", after):
            if len(before) + len(after) > 160:
                before, after = (f"..{text}.." for text in _difference(before, after, around=40))
            yield f"{function}: {before} -> {after}", code


def _difference(one: T, two: T, around: int) -> tuple[T, T]:
    """Both without what they begin and end with in common, but for so many characters or lines around the rest."""
    start = max(0, _alike(one, two) - around)
    end = max(0, _alike(one[start:][::-1], two[start:][::-1]) - around)
    return one[start : len(one) - end], two[start : len(two) - end]


def _alike(one: Sequence[str], two: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def row_of(mutants: list[tuple[str, int]], equivalent: dict[str, str]) -> dict[str, Any]:
    """Count a module's mutants; `equivalent` has those that change nothing, with the reason."""
    survivors = [
        {"mutant": mutant, "reason": equivalent.get(mutant, f"no test {'calls' if code else 'notices'} it")}
        for mutant, code in mutants
        if code in (SURVIVED, *UNTESTED)
    ]
    counted = len(mutants) - sum(each["mutant"] in equivalent for each in survivors)
    killed = len(mutants) - len(survivors)
    return {"mutants": len(mutants), "counted": counted, "killed": killed, "survivors": survivors}


def _write(path: Path, rows: dict[str, Any]) -> None:
    record = {
        "bench": "mutation",
        "machine": machine.describe(),
        "versions": versions("torch", "pytest", "hypothesis", "mutmut"),
        "modules": dict(sorted(rows.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
