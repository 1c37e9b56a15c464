"""Readability of src/rollmill in numbers: its size and structure, and the code that one training step runs.

The step is a GRPO step of examples/minimal.yaml under sys.setprofile (see `ours/structure.py`). Everything else comes
from the syntax trees. Targets are goals, not limits: only the table is printed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, ROOT, BenchError
from rollmill.python_source import parse_python

SOURCE = ROOT / "src" / "rollmill"
LOOP = "orchestrator"  #: the package of the training loop
#: Packages from the bottom up: imports should point downwards.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "types", "seeds", "files", "python_source", "waiting", "progress", "ray_session", "startup"),
    ("config", "registry", "user_code"),
    ("web", "sandbox", "models"),
    ("algorithms", "engines", "data", "weights"),
    ("buffer", "rewards", "trackers", "report"),
    ("pipelines", "rollout", "trainer", "offload"),
    ("audit", "feedback"),
    ("orchestrator", "remote", "supervision"),
    ("simulation",),
    ("launch", "planning"),
    ("quickstart", "serving", "ui"),
    ("api",),
    ("cli",),
)
#: Classes that carry a completion of one turn, from the engine to the loss.
CARRIERS = (
    "SequenceState",
    "Completion",
    "Experience",
    "PendingGroup",
    "Group",
    "CacheEntry",
    "TokenTable",
    "MicroBatch",
    "LossInputs",
    "Sample",
    "Trajectory",
    "Batch",
)
#: One built-in of each kind, by its names: files that mention them are those that a new built-in would touch.
BUILT_IN = {
    "algorithm": r"\b(?:gmpo|GMPO|GMPOLoss|gmpo_clipped)\b",
    "reward": r"\b(?:citation|CitationReward|CitationScorer)\b",
    "workflow": r"\b(?:few_shot|FewShotWorkflow)\b",
    "operator": r"\b(?:near_duplicates|NearDuplicatesOperator|NearDuplicates)\b",
}
TARGETS = {
    "files": 320,
    "lines": 55_000,
    "step_files": 35,
    "step_functions": 250,
    "step_classes": 40,
    "frames_to_the_step": 5,
    "carriers": 5,
    "files_called_build": 2,
    "class_names_used_twice": 0,
    "docstrings_that_open_with_a_question": 30,
    "isinstance_in_the_loop": 0,
    "classes_over_250_lines": 0,
    "import_circles": 0,
    "imports_upwards": 0,
    "files_of_an_algorithm": 2,
    "files_of_a_reward": 2,
    "files_of_a_workflow": 2,
    "files_of_an_operator": 2,
    "architecture_page_lines": 200,
}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench structure", description=__doc__)
    parser.add_argument("--details", action="store_true", help="name what was counted, too")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where structure.json is written")
    args = parser.parse_args(arguments)
    measures, details = static_measures(SOURCE)
    crossed = step_crossing()
    measures |= {f"step_{kind}": len(crossed[kind]) for kind in ("files", "functions", "classes")}
    measures["frames_to_the_step"] = crossed["frames"]
    details |= {f"step_{kind}": crossed[kind] for kind in ("files", "functions", "classes")}
    args.folder.mkdir(parents=True, exist_ok=True)
    line = {"bench": "structure", "measures": measures, "targets": TARGETS}
    (args.folder / "structure.json").write_text(json.dumps(line, indent=1) + "\n")
    if not only_json:
        print(f"{'measure':<40}{'now':>8}{'target':>9}")
        for name, value in measures.items():
            print(f"{name.replace('_', ' '):<40}{value:>8}{TARGETS.get(name, ''):>9}")
        for name, found in details.items() if args.details else ():
            print(f"\n{name.replace('_', ' ')}:\n  " + "\n  ".join(found))
    print(json.dumps(line))


def step_crossing() -> dict[str, Any]:
    """Files, functions and classes of rollmill that one step calls, and the frames from the command to it."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.ours.structure"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise BenchError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def static_measures(source: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Measures from the syntax trees of a package, and the names behind them."""
    trees = {
        path.relative_to(source).as_posix(): parse_python(path.read_text()) for path in sorted(source.rglob("*.py"))
    }
    lines = {name: len((source / name).read_text().splitlines()) for name in trees}
    classes = [
        (name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    places = defaultdict(list)
    for name, node in classes:
        places[node.name].append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    questions = [f"{name}: {text}" for name, tree in trees.items() for text in _docstrings(tree) if _is_question(text)]
    large = [f"{name}: {node.name}, {_length(node)}" for name, node in classes if _length(node) > 250]
    loop = [name for name in trees if name.startswith(f"{LOOP}/")]
    checks = {name: sum(_is_check(node) for node in ast.walk(trees[name])) for name in loop}
    imports = {name: set(_imports(name, tree, trees)) for name, tree in trees.items()}
    circles = [" -> ".join(found) for found in _circles(imports)]
    upwards = [f"{name} -> {other}" for name, others in imports.items() for other in others if _points_up(name, other)]
    carriers = [name for name in CARRIERS if name in places]
    built_in = {kind: _mentions(source, trees, pattern) for kind, pattern in BUILT_IN.items()}
    page = ROOT / "docs" / "architecture.md"
    measures = {
        "files": len(trees),
        "lines": sum(lines.values()),
        "median_file": int(statistics.median(lines.values())),
        "files_under_40_lines": sum(0 < count < 40 for count in lines.values()),
        "files_over_400_lines": sum(count > 400 for count in lines.values()),
        "files_of_the_loop": len(loop),
        "carriers": len(carriers),
        "files_called_build": sum(name.endswith("/build.py") for name in trees),
        "class_names_used_twice": len(twice),
        "docstrings_that_open_with_a_question": len(questions),
        "isinstance_in_the_loop": sum(checks.values()),
        "classes_over_250_lines": len(large),
        "import_circles": len(circles),
        "imports_upwards": len(upwards),
        **{f"files_of_a{'n' if kind[0] in 'ao' else ''}_{kind}": len(found) for kind, found in built_in.items()},
        "architecture_page_lines": len(page.read_text().splitlines()),
    }
    details = {
        "carriers": carriers,
        "class_names_used_twice": [f"{name}: {', '.join(found)}" for name, found in sorted(twice.items())],
        "docstrings_that_open_with_a_question": questions,
        "isinstance_in_the_loop": [f"{name}: {count}" for name, count in checks.items() if count],
        "classes_over_250_lines": large,
        "import_circles": circles,
        "imports_upwards": sorted(upwards),
        **{f"files_of_{kind}": found for kind, found in built_in.items()},
    }
    return measures, details


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text.splitlines()[0]
        for each, after in _pairs(getattr(node, "body", [])):
            value = getattr(after, "value", None)
            if (
                isinstance(each, ast.Assign | ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
                and value.value.strip()
            ):
                yield value.value.strip().splitlines()[0]


def _pairs(body: Any) -> Iterable[tuple[ast.AST, ast.AST]]:
    return itertools.pairwise(body) if isinstance(body, list) else ()


def _is_question(text: str) -> bool:
    return re.match(r"(?:What|Where|How|Which)\b", text) is not None


def _length(node: ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"


def _imports(name: str, tree: ast.Module, modules: Iterable[str]) -> Iterator[str]:
    """Modules of the package that are imported at module level, except for type checking only."""
    known = set(modules)
    for node in _module_level(tree.body):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for each in wanted:
            if (found := _file_of(each, known)) is not None and found != name:
                yield found


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _module_level(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _module_level(node.body)
        else:
            yield node


def _file_of(dotted: str, known: set[str]) -> str | None:
    parts = dotted.split(".")
    if parts[0] != "rollmill":
        return None
    for length in range(len(parts), 0, -1):
        base = "/".join(parts[1:length])
        for candidate in (f"{base}.py", f"{base}/__init__.py" if base else "__init__.py"):
            if candidate in known:
                return candidate
    return None


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan), smallest name first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for name in imports:
            if name not in index:
                visit(name)
    finally:
        sys.setrecursionlimit(limit)
    return found


def _points_up(name: str, other: str) -> bool:
    ranks = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}
    one, two = (ranks.get(path.split("/")[0].removesuffix(".py")) for path in (name, other))
    return one is not None and two is not None and two > one


def _mentions(source: Path, names: Iterable[str], pattern: str) -> list[str]:
    counts = Counter({name: len(re.findall(pattern, (source / name).read_text())) for name in names})
    importers = "config/importing/"  # they name other frameworks' parts, and a new one need not be there
    return sorted(name for name, count in counts.items() if count and importers not in name)
