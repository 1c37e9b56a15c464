"""Readability of src/rollmill in numbers: its size and structure, and the code that one training step runs.

The step is a GRPO step of examples/minimal.yaml under sys.setprofile (ours/structure.py). Everything else comes from
the syntax trees. Targets are goals, not limits. With --check, a measure of `MAY_ONLY_FALL` that is larger than in the
committed bench/results/structure.json is an error; nothing is run or written then.
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
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, ROOT, BenchError
from rollmill.python_source import parse_python

SOURCE = ROOT / "src" / "rollmill"
LOOP = "orchestrator"  #: the package of the training loop
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
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
    "reward": r"\b(?:citation|CitationReward)\b",
    "workflow": r"\b(?:few_shot|FewShotWorkflow)\b",
    "operator": r"\b(?:near_duplicates|NearDuplicatesOperator|NearDuplicates)\b",
}
APPLICATIONS = "apps/"  #: what lies above the core
TARGETS = {
    "files": 330,
    "lines": 62_000,
    "lines_with_applications_and_libraries": 88_000,
    "functions": 4_000,
    "median_function": 9,
    "private_helpers_used_once": 500,
    "functions_that_only_forward": 20,
    "docstrings_that_say_see": 40,
    "docstrings_of_four_words": 100,
    "step_files": 45,
    "step_functions": 260,
    "step_classes": 40,
    "frames_to_the_step": 6,
    "files_that_the_loop_loads": 150,
    "carriers": 5,
    "files_called_build": 2,
    "class_names_used_twice": 0,
    "docstrings_that_open_with_a_question": 30,
    "isinstance_in_the_loop": 0,
    "classes_over_250_lines": 0,
    "import_circles": 0,
    "packages_in_circles": 0,
    "imports_upwards": 0,
    "files_of_an_algorithm": 2,
    "files_of_a_reward": 1,
    "files_of_a_workflow": 1,
    "files_of_an_operator": 1,
    "architecture_page_lines": 200,
}
MAY_ONLY_FALL = (
    "private_helpers_used_once",
    "functions_that_only_forward",
    "docstrings_that_say_see",
    "docstrings_of_four_words",
    "files_that_the_loop_loads",
    "class_names_used_twice",
    "docstrings_that_open_with_a_question",
    "isinstance_in_the_loop",
    "classes_over_250_lines",
    "import_circles",
    "packages_in_circles",
    "imports_upwards",
)


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark of the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench structure", description=__doc__)
    parser.add_argument("--details", action="store_true", help="name what was counted, too")
    parser.add_argument("--check", action="store_true", help="only compare with what is committed")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where structure.json is written")
    args = parser.parse_args(arguments)
    measures, details = static_measures(SOURCE)
    if args.check:
        committed = json.loads((RESULTS / "structure.json").read_text())["measures"]
        if worse := [name for name in MAY_ONLY_FALL if measures[name] > committed[name]]:
            found = "\n".join(f"{name.replace('_', ' ')}: {measures[name]}, {committed[name]} before" for name in worse)
            raise BenchError(
                f"{found}\npython -m bench structure --details names them; if they have to be, run "
                "python -m bench structure, commit bench/results/structure.json and say why"
            )
        return
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
        for title, listed in details.items() if args.details else ():
            print(f"\n{title.replace('_', ' ')}:\n  " + "\n  ".join(listed))
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
    everything = {
        path.relative_to(source).as_posix(): parse_python(path.read_text()) for path in sorted(source.rglob("*.py"))
    }
    trees = {name: tree for name, tree in everything.items() if not name.startswith(APPLICATIONS)}
    lines = {name: len((source / name).read_text().splitlines()) for name in everything}
    libraries = [path.read_text() for path in sorted(source.parents[1].glob("libs/*/src/**/*.py"))]
    core = [lines[name] for name in trees]
    classes = [
        (name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    places = defaultdict(list)
    for name, node in classes:
        places[node.name].append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    functions = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, FUNCTION)]
    docstrings = [(name, text) for name, tree in trees.items() for text in _docstrings(tree)]
    loop = [name for name in trees if name.startswith(f"{LOOP}/")]
    checks = {name: sum(_is_check(node) for node in ast.walk(trees[name])) for name in loop}
    at_start = {name: set(_imports(name, _module_level(tree.body), everything)) for name, tree in everything.items()}
    imports = {name: set(_imports(name, _executed(tree), everything)) for name, tree in everything.items()}
    packages: dict[str, set[str]] = defaultdict(set)
    for name, others in imports.items():
        packages[_package(name)] |= {_package(other) for other in others} - {_package(name)}
    for name in {each for others in packages.values() for each in others}:
        packages.setdefault(name, set())
    in_circles = [each for found in _circles(packages) for each in found]
    page = ROOT / "docs" / "architecture.md"
    details = {
        "carriers": [name for name in CARRIERS if name in places],
        "private_helpers_used_once": [f"{name}: {each}" for name in trees for each in _used_once(trees[name])],
        "functions_that_only_forward": [f"{name}: {node.name}" for name, node in functions if _only_forwards(node)],
        "docstrings_that_say_see": [f"{name}: {text}" for name, text in docstrings if text.startswith("See ")],
        "docstrings_of_four_words": [f"{name}: {text}" for name, text in docstrings if len(text.split()) <= 4],
        "class_names_used_twice": [f"{name}: {', '.join(found)}" for name, found in sorted(twice.items())],
        "docstrings_that_open_with_a_question": [f"{name}: {text}" for name, text in docstrings if _is_question(text)],
        "isinstance_in_the_loop": [f"{name}: {count}" for name, count in checks.items() if count],
        "classes_over_250_lines": [
            f"{name}: {node.name}, {_length(node)}" for name, node in classes if _length(node) > 250
        ],
        "import_circles": [" -> ".join(found) for found in _circles(imports)],
        "packages_in_circles": in_circles,
        "imports_upwards": sorted(
            f"{name} -> {other}" for name, others in imports.items() for other in others if _points_up(name, other)
        ),
        "files_that_the_loop_loads": sorted(_reached(f"{LOOP}/loop.py", at_start)),
        **{f"files_of_{_with_article(kind)}": _mentions(source, trees, pattern) for kind, pattern in BUILT_IN.items()},
    }
    measures = {
        "files": len(trees),
        "lines": sum(core),
        "lines_with_applications_and_libraries": sum(lines.values())
        + sum(len(text.splitlines()) for text in libraries),
        "median_file": int(statistics.median(core)),
        "files_under_40_lines": sum(0 < count < 40 for count in core),
        "files_over_400_lines": sum(count > 400 for count in core),
        "functions": len(functions),
        "median_function": int(statistics.median([_length(node) for _, node in functions])),
        "files_of_the_loop": len(loop),
        "files_called_build": sum(name.endswith("/build.py") for name in trees),
        **{name: len(found) for name, found in details.items()},
        "isinstance_in_the_loop": sum(checks.values()),
        "architecture_page_lines": len(page.read_text().splitlines()),
    }
    return measures, details


def _with_article(kind: str) -> str:
    return f"a{'n' if kind[0] in 'ao' else ''}_{kind}"


def _used_once(tree: ast.Module) -> list[str]:
    """Private functions and methods that their file names once besides their definition."""
    defined = [node.name for node in ast.walk(tree) if isinstance(node, FUNCTION)]
    named = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return [name for name in defined if re.match(r"_[^_]", name) and named[name] == 1 and defined.count(name) == 1]


def _only_forwards(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if the body is one call that passes on the parameters as they are, and the function is no decorated one."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    if len(body) != 1 or node.decorator_list or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    called = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(called, ast.Call) or re.match(r"__\w+__$", node.name):
        return False
    passed = [*called.args, *(each.value for each in called.keywords)]
    names = [each.id for each in passed if isinstance(each, ast.Name)]
    return bool(names) and len(names) == len(passed) and names == [each for each in parameters if each != "self"]


def _reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Files that importing a file loads, with the packages that hold them."""
    found, left = set(), [name] if name in imports else []
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            folders = [f"{folder.as_posix()}/__init__.py".removeprefix("./") for folder in Path(each).parents]
            left += [*imports[each], *(folder for folder in folders if folder in imports)]
    return found


def _package(name: str) -> str:
    """The package of a file, or the file's own name if it is in none."""
    parts = name.split("/")
    return "/".join(parts[:2]) if name.startswith(APPLICATIONS) else parts[0].removesuffix(".py")


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


def _length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"


def _imports(name: str, statements: Iterable[ast.AST], modules: Iterable[str]) -> Iterator[str]:
    """Modules of the package that these statements of a module import."""
    known = set(modules)
    for node in statements:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for each in wanted:
            if (found := _file_of(each, known)) is not None and found != name:
                yield found


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, but for what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _executed(child)


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


@cache
def _ranks() -> dict[str, int]:
    """Height of each package, by the layers that the import linter holds (pyproject.toml)."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = settings["contracts"][0]["layers"]
    return {name: -height for height, names in enumerate(layers) for name in names.split(" : ")}


def _points_up(name: str, other: str) -> bool:
    one, two = (_ranks().get(path.split("/")[0].removesuffix(".py")) for path in (name, other))
    return one is not None and two is not None and two > one


def _mentions(source: Path, names: Iterable[str], pattern: str) -> list[str]:
    counts = Counter({name: len(re.findall(pattern, (source / name).read_text())) for name in names})
    importers = "apps/importing/"  # they name other frameworks' parts, and a new one need not be there
    return sorted(name for name, count in counts.items() if count and importers not in name)
