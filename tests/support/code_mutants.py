"""Wrong versions of HumanEval's canonical solutions; which of them its checks notice is found out without rollmill."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.FloorDiv),
    ast.Div: (ast.FloorDiv, ast.Mult),
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.USub: (ast.UAdd,),
}
Mutation = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """One changed solution of one row, as the text of a completion."""

    row: dict[str, str]
    what: str
    code: str


def load_rows(data: Path) -> list[dict[str, str]]:
    """The rows of HumanEval."""
    with open(data / "humaneval" / "HumanEval.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def mutants(row: dict[str, str]) -> list[tuple[int, int, int]]:
    """Every single change of the solution: which statement it is, which of its nodes, which mutation."""
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    return [
        (function, index, number)
        for function, definition in enumerate(tree.body)
        if isinstance(definition, ast.FunctionDef) and definition.name == row["entry_point"]
        for index, node in enumerate(ast.walk(definition))
        for number in range(len(_mutations(node)))
    ]


def mutant(row: dict[str, str], place: tuple[int, int, int]) -> Mutant:
    """The whole program with one change."""
    function, index, number = place
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    node = list(ast.walk(tree.body[function]))[index]
    what, change = _mutations(node)[number]
    change(node)
    code = ast.unparse(ast.fix_missing_locations(tree))
    return Mutant(row, f"{row['task_id']} line {getattr(node, 'lineno', 0)}: {what}", code)


def _mutations(node: ast.AST) -> list[tuple[str, Mutation]]:
    """What can be changed in a node: a name for it, and the function that does it in place."""
    found: list[tuple[str, Mutation]] = []
    match node:
        case ast.Compare():
            found += [
                (f"compare {new.__name__}", _setting(_first_op, new)) for new in _SWAPS.get(type(node.ops[0]), ())
            ]
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() | ast.UnaryOp(op=ast.USub()):
            found += [(f"operator {new.__name__}", _setting(_op, new)) for new in _SWAPS.get(type(node.op), ())]
        case ast.Constant(value=bool()):
            found.append(("other truth value", lambda node: setattr(node, "value", not node.value)))
        case ast.Constant(value=int() | float()):
            found.append(("plus one", lambda node: setattr(node, "value", node.value + 1)))
            found.append(("minus one", lambda node: setattr(node, "value", node.value - 1)))
        case ast.Constant(value=str(text)) if len(text) < 30:
            found.append(("other text", lambda node: setattr(node, "value", node.value + "x")))
        case ast.If() | ast.While() | ast.IfExp():
            found.append(("negated", lambda node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))))
        case ast.Return(value=ast.expr()):
            found.append(("returns None", lambda node: setattr(node, "value", ast.Constant(None))))
        case ast.Slice(upper=ast.expr()):
            found.append(("no end", lambda node: setattr(node, "upper", None)))
    if isinstance(getattr(node, "body", None), list):
        removable = [
            i for i, each in enumerate(node.body) if isinstance(each, ast.Assign | ast.AugAssign | ast.If | ast.For)
        ]  # type: ignore[attr-defined]
        found += [(f"without {type(node.body[i]).__name__}", _removing(i)) for i in removable]  # type: ignore[attr-defined]
    return found


def _first_op(node: Any, new: ast.AST) -> None:
    node.ops[0] = new


def _op(node: Any, new: ast.AST) -> None:
    node.op = new


def _setting(set_op: Callable[[Any, ast.AST], None], new: type[ast.AST]) -> Mutation:
    return lambda node: set_op(node, new())


def _removing(index: int) -> Mutation:
    return lambda node: node.body.__setitem__(index, ast.Pass())


def chosen(rows: list[dict[str, str]], count: int, seed: int) -> list[Mutant]:
    """Mutants by chance, problem by problem in turn, so that each problem has about the same number."""
    generator = random.Random(seed)
    pools = [(row, mutants(row)) for row in rows]
    for _, pool in pools:
        generator.shuffle(pool)
    places: list[tuple[dict[str, str], tuple[int, int, int]]] = []
    while len(places) < count and any(pool for _, pool in pools):
        places += [(row, pool.pop()) for row, pool in pools if pool]
    generator.shuffle(places)
    return [mutant(*place) for place in places[:count]]


_PLAIN = """
import contextlib, io, json, os, resource, signal, sys
for line in sys.stdin:
    program = json.loads(line)
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        signal.setitimer(signal.ITIMER_PROF, 0.5)
        signal.alarm(8)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(program, {"__name__": "plain"})
        except BaseException:
            os._exit(1)
        os._exit(0)
    print(int(os.waitpid(pid, 0)[1] == 0), flush=True)
"""


def passes_plainly(found: list[Mutant]) -> list[bool]:
    """Whether each passes its check as published, in a plain process: the program, the check, and the call of it."""
    programs = [f"{each.code}\n{each.row['test']}\ncheck({each.row['entry_point']})\n" for each in found]
    lines = "".join(json.dumps(program) + "\n" for program in programs)
    done = subprocess.run([sys.executable, "-I", "-c", _PLAIN], input=lines, capture_output=True, text=True, check=True)
    return [line == "1" for line in done.stdout.splitlines()]
