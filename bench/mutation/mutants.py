"""Mutants of a module: one small change each, in the order of the source.

Annotations, decorators, docstrings, assertions, `raise` statements and f-strings are not mutated, because behaviour
does not depend on them; neither are `device` and `strict` arguments, which have no effect on one device and for equal
lengths.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
#: Functions and methods that replace each other.
FUNCTIONS = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
    "sum": "mean",
    "mean": "sum",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "zeros": "ones",
    "new_zeros": "new_ones",
    "expm1": "exp",
    "log1p": "log",
    "cos": "sin",
    "append": "extend",
}
#: Methods whose call can be dropped, keeping the value.
PASSING = {"detach", "clamp", "abs", "exp", "log", "sqrt", "nan_to_num", "masked_fill", "copy", "clone", "double"}
STRINGS = {"amin": "amax", "amax": "amin"}
#: Words of a name, and whole names, that replace each other where both exist.
WORDS = (
    ("low", "high"),
    ("first", "last"),
    ("start", "end"),
    ("chosen", "rejected"),
    ("student", "teacher"),
    ("policy", "reference"),
    ("positive", "negative"),
    ("old", "rollout"),
    ("before", "after"),
    ("peak", "valley"),
    ("warmup", "decay"),
    ("started", "submitted"),
    ("started", "finished"),
)
NAMES = (
    ("logprob", "old_logprob"),
    ("logprob", "rollout_logprob"),
    ("logprob", "reference_logprob"),
    ("rewards", "step_rewards"),
    ("groups", "episodes"),
    ("groups", "anchors"),
    ("mean", "total"),
    ("count", "total"),
    ("values", "returns"),
    ("advantages", "returns"),
    ("sequence", "group"),
    ("experience", "tokens"),
    ("roots", "children"),
    ("root", "child"),
    ("prompt", "text"),
)
UNTOUCHED_KEYWORDS = {"strict", "device"}
COMMUTATIVE = {"min", "max", "minimum", "maximum", "logaddexp"}


@dataclass(eq=False)
class Mutant:
    """One change. `apply` makes it, once, in the syntax tree that the mutant comes from."""

    path: str  #: of the file
    line: int
    lines: range  #: a test that reaches a statement on one of these lines runs the change
    code: str  #: that line
    function: str  #: qualified name of the enclosing function, "" at module level
    operator: str
    old: str
    new: str
    owner: ast.stmt  #: the outermost function, or the statement at the top level of the module or of a class
    cls: str  #: the class that contains the owner, or ""
    inside: bool  #: in the function's body, rather than evaluated when the module is loaded
    apply: Callable[[], None]
    nth: int = 0  #: index among mutants with the same change on an identical line of the function

    @property
    def change(self) -> str:
        """The change as text."""
        return f"{self.old} -> {self.new}"


@dataclass(frozen=True)
class _Place:
    """Context of a node."""

    owner: ast.stmt
    cls: str
    statement: ast.stmt
    inside: bool
    names: frozenset[str]  #: bound in the owner


def mutants(tree: ast.Module, source: str, path: str) -> list[Mutant]:
    """List all mutants of a module in the order of the source; `tree` is its syntax tree."""
    attributes = frozenset(
        [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        + [n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    )
    lister, found = _Lister(path, source.splitlines(), attributes), list[Mutant]()
    for owner, cls in _owners(tree):
        found += lister.statement(owner, _Place(owner, cls, owner, False, _bound(owner)))
    found.sort(key=lambda mutant: mutant.line)
    seen: Counter[tuple[str, str, str]] = Counter()
    for mutant in found:
        alike = (mutant.function, mutant.code, mutant.change)
        mutant.nth, seen[alike] = seen[alike], seen[alike] + 1
    return found


def _owners(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Functions and assignments at the top level of the module and of its classes."""

    def of(body: list[ast.stmt], cls: str) -> Iterator[tuple[ast.stmt, str]]:
        for each in body:
            if isinstance(each, ast.ClassDef):
                yield from of(each.body, f"{cls}.{each.name}" if cls else each.name)
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or _is_data(each, cls):
                yield each, cls

    yield from of(tree.body, "")


def _is_data(statement: ast.stmt, cls: str) -> bool:
    """Whether it assigns a value that functions use, rather than a type or `__all__`."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    named = isinstance(target, ast.Name) and target.id != "__all__"
    if cls:
        return named and isinstance(statement.value, ast.Constant | ast.UnaryOp)
    return named and isinstance(statement.value, ast.Constant | ast.Dict | ast.UnaryOp | ast.Call | ast.Tuple)


def _bound(owner: ast.stmt) -> frozenset[str]:
    arguments = [n.arg for n in ast.walk(owner) if isinstance(n, ast.arg)]
    return frozenset(
        arguments + [n.id for n in ast.walk(owner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    )


class _Lister:
    def __init__(self, path: str, source: list[str], attributes: frozenset[str]) -> None:
        self._path, self._source, self._attributes = path, source, attributes

    def statement(self, node: ast.stmt, place: _Place) -> Iterator[Mutant]:
        """Mutants of a statement and everything in it."""
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Pass):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            outermost = node is place.owner
            arguments = node.args
            for defaults in (arguments.defaults, arguments.kw_defaults):
                for at, default in enumerate(defaults):
                    if default is not None:
                        yield from self._expression(default, partial(_put, defaults, at), place)
            inner = _Place(place.owner, place.cls, node, True, place.names)
            yield from self._body(node.body, inner if outermost else place)
            return
        here = _Place(place.owner, place.cls, node, place.inside, place.names)
        if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            nothing = partial(setattr, node, "value", ast.Constant(None))
            yield self._mutant(here, node, "return nothing", ast.unparse(node), "return None", nothing)
        if isinstance(node, ast.If | ast.While):
            for value in (True, False) if isinstance(node, ast.If) else (False,):
                put = partial(setattr, node, "test", ast.Constant(value))
                yield self._mutant(here, node.test, "condition", ast.unparse(node.test), str(value), put)
        if isinstance(node, ast.For | ast.AsyncFor):
            put = partial(setattr, node, "iter", ast.Tuple([], ast.Load()))
            yield self._mutant(here, node.iter, "no loop", f"in {ast.unparse(node.iter)}", "in ()", put)
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            changed = ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
            put = partial(setattr, node, "op", changed.op)
            yield self._mutant(here, node, "arithmetic", ast.unparse(node), ast.unparse(changed), put)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "decorator_list", "target", "targets"):
                continue
            if field in ("body", "orelse", "finalbody"):
                yield from self._body(value, here)
            elif isinstance(value, ast.expr):
                yield from self._expression(value, partial(setattr, node, field), here)
            elif isinstance(value, list):
                for each in value:
                    if isinstance(each, ast.ExceptHandler | ast.match_case):
                        yield from self._body(each.body, here)
                    elif isinstance(each, ast.withitem):
                        yield from self._expression(each.context_expr, partial(setattr, each, "context_expr"), here)

    def _body(self, body: list[ast.stmt], place: _Place) -> Iterator[Mutant]:
        for at, node in enumerate(body):
            if self._can_go(node, place):
                here = _Place(place.owner, place.cls, node, place.inside, place.names)
                put = partial(_put, body, at, ast.copy_location(ast.Pass(), node))
                yield self._mutant(here, node, "dropped statement", _short(ast.unparse(node)), "pass", put)
            yield from self.statement(node, place)

    def _can_go(self, node: ast.stmt, place: _Place) -> bool:
        """Whether the statement can be dropped without leaving a name undefined."""
        if isinstance(node, ast.Expr):
            return not isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Assign):
            return all(self._rebinds(target, node, place) for target in node.targets)
        return isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Delete | ast.Raise)

    @staticmethod
    def _rebinds(target: ast.expr, node: ast.Assign, place: _Place) -> bool:
        if isinstance(target, ast.Tuple):
            return all(_Lister._rebinds(each, node, place) for each in target.elts)
        if not isinstance(target, ast.Name):
            return True
        earlier = [n for n in ast.walk(place.owner) if isinstance(n, ast.arg) and n.arg == target.id]
        bound = [
            n
            for n in ast.walk(place.owner)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == target.id
        ]
        return bool(earlier) or any(n.lineno < node.lineno for n in bound)

    def _expression(self, node: ast.expr, put: Callable[[ast.expr], None], place: _Place) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr):
            return
        for operator, new in self._alternatives(node, place):
            apply = partial(put, ast.copy_location(new, node))
            yield self._mutant(place, node, operator, *_difference(node, new), apply)
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and not isinstance(node, ast.Lambda):
                yield from self._expression(value, partial(setattr, node, field), place)
            elif isinstance(node, ast.Lambda) and field == "body":
                yield from self._expression(node.body, partial(setattr, node, "body"), place)
            elif isinstance(value, list):
                for at, each in enumerate(value):
                    if isinstance(each, ast.expr):
                        yield from self._expression(each, partial(_put, value, at), place)
                    elif isinstance(each, ast.keyword) and each.arg not in UNTOUCHED_KEYWORDS:
                        yield from self._expression(each.value, partial(setattr, each, "value"), place)
                    elif isinstance(each, ast.comprehension):
                        yield from self._comprehension(each, place)

    def _comprehension(self, node: ast.comprehension, place: _Place) -> Iterator[Mutant]:
        yield from self._expression(node.iter, partial(setattr, node, "iter"), place)
        for at, test in enumerate(node.ifs):
            put = partial(_put, node.ifs, at, ast.Constant(True))
            yield self._mutant(place, test, "condition", f"if {ast.unparse(test)}", "if True", put)
            yield from self._expression(test, partial(_put, node.ifs, at), place)

    def _alternatives(self, node: ast.expr, place: _Place) -> Iterator[tuple[str, ast.expr]]:
        """Replacements for an expression."""
        match node:
            case ast.Compare():
                for at, op in enumerate(node.ops):
                    for other in COMPARED[type(op)]:
                        ops = [*node.ops[:at], other(), *node.ops[at + 1 :]]
                        yield "comparison", ast.Compare(node.left, ops, node.comparators)
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(op)](), right)
            case ast.UnaryOp(ast.USub() | ast.Invert() | ast.Not(), operand):
                yield "dropped sign", operand
            case ast.BoolOp(op, values):
                yield "and/or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
                for at in range(len(values)):
                    rest = [*values[:at], *values[at + 1 :]]
                    yield "dropped operand", ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
            case ast.IfExp(_, body, orelse):
                yield "condition", body
                yield "condition", orelse
            case ast.Constant(value):
                yield from (("constant", ast.Constant(other)) for other in _other_constants(value))
            case ast.Subscript(value, index, ast.Load()):
                yield "dropped index", value
                if isinstance(index, ast.Constant) and index.value == 0:
                    yield "constant", ast.Subscript(value, ast.Constant(-1), ast.Load())
                if isinstance(index, ast.Slice):
                    for bound in ("lower", "upper"):
                        if getattr(index, bound) is not None:
                            open_ = copy.copy(index)
                            setattr(open_, bound, None)
                            yield "dropped bound", ast.Subscript(value, open_, ast.Load())
            case ast.Tuple(elements, ast.Load()) if place.inside and len(elements) > 1:
                for at in range(len(elements) - 1):
                    yield from _swapped(elements, at, lambda swapped: ast.Tuple(swapped, ast.Load()))
            case ast.Dict(keys, values):
                for at in range(len(values) - 1):
                    yield from _swapped(values, at, partial(ast.Dict, keys))
            case ast.Name(name, ast.Load()):
                for other_name in _confused(name, place.names):
                    yield "other name", ast.Name(other_name, ast.Load())
            case ast.Attribute(value, name, ast.Load()):
                for other_name in _confused(name, self._attributes):
                    yield "other attribute", ast.Attribute(value, other_name, ast.Load())
            case ast.Call():
                yield from _other_calls(node)

    def _mutant(
        self, place: _Place, node: ast.AST, operator: str, old: str, new: str, apply: Callable[[], None]
    ) -> Mutant:
        statement, owner = place.statement, place.owner
        lines = range(statement.lineno, statement.lineno + 1)
        if statement is owner:  # a default value, which affects the whole function
            lines = range(owner.lineno, (owner.end_lineno or owner.lineno) + 1)
        name, line = getattr(owner, "name", ""), getattr(node, "lineno", statement.lineno)
        return Mutant(
            path=self._path,
            line=line,
            code=self._source[line - 1].strip(),
            lines=lines,
            function=f"{place.cls}.{name}".strip("."),
            operator=operator,
            old=old,
            new=new,
            owner=owner,
            cls=place.cls,
            inside=place.inside,
            apply=apply,
        )


def _other_calls(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    function, arguments, keywords = node.func, node.args, node.keywords
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in FUNCTIONS:
        renamed = copy.copy(function)
        setattr(renamed, "attr" if isinstance(function, ast.Attribute) else "id", FUNCTIONS[name])
        yield "other function", ast.Call(renamed, arguments, keywords)
    if isinstance(function, ast.Attribute) and name in PASSING and not _is_module(function.value):
        yield "dropped call", function.value
    elif arguments and not isinstance(arguments[0], ast.Starred | ast.GeneratorExp) and _may_pass(function, name):
        yield "dropped call", arguments[0]
    for at in range(0 if name in COMMUTATIVE else len(arguments) - 1):
        if not any(isinstance(each, ast.Starred) for each in arguments[at : at + 2]):
            yield from _swapped(arguments, at, lambda swapped: ast.Call(function, swapped, keywords))
    plain = [keyword for keyword in keywords if keyword.arg and keyword.arg not in UNTOUCHED_KEYWORDS]
    for keyword in plain:
        yield "dropped argument", ast.Call(function, arguments, [each for each in keywords if each is not keyword])
        if keyword.arg in ("min", "max") and len(plain) == 1:
            other = ast.keyword("max" if keyword.arg == "min" else "min", keyword.value)
            yield "min/max", ast.Call(function, arguments, [other])
    for one, two in pairwise(plain):
        if ast.dump(one.value) != ast.dump(two.value):
            swapped = {id(one): ast.keyword(one.arg, two.value), id(two): ast.keyword(two.arg, one.value)}
            yield "swapped", ast.Call(function, arguments, [swapped.get(id(each), each) for each in keywords])


def _may_pass(function: ast.expr, name: str) -> bool:
    """Whether the first argument can replace the call: functions of torch, math and the project."""
    if isinstance(function, ast.Attribute):
        return _is_module(function.value)
    return name in ("sorted", "min", "max", "abs") or (name.islower() and not hasattr(builtins, name))


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "math", "np")


def _swapped(
    values: list[ast.expr], at: int, make: Callable[[list[ast.expr]], ast.expr]
) -> Iterator[tuple[str, ast.expr]]:
    one, two = values[at : at + 2]
    if ast.dump(one) != ast.dump(two):
        yield "swapped", make([*values[:at], two, one, *values[at + 2 :]])


def _other_constants(value: object) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1] if value else [1]  # -1 is the same dimension as 0 where there is one
    if isinstance(value, float):
        return [value + 1, -value] if value else [1.0]
    if isinstance(value, str):
        return [STRINGS.get(value, f"{value}?")]
    return []


def _confused(name: str, known: frozenset[str]) -> list[str]:
    words, others = name.split("_"), []
    for pair in WORDS:
        for one, two in (pair, pair[::-1]):
            if one in words:
                others.append("_".join(two if word == one else word for word in words))
    for pair in NAMES:
        others += [two for one, two in (pair, pair[::-1]) if one == name]
    return [other for other in dict.fromkeys(others) if other in known]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _put(values: list[Any], at: int, new: ast.AST) -> None:
    values[at] = new


def _difference(old: ast.expr, new: ast.expr) -> tuple[str, str]:
    """Both as text; for long calls, tuples and dicts only the parts that differ."""
    if isinstance(old, ast.Call) and isinstance(new, ast.Call) and len(ast.unparse(old)) > 60:
        name = ast.unparse(old.func)
        parts = [[ast.unparse(part) for part in (*each.args, *each.keywords)] for each in (old, new)]
        if name == ast.unparse(new.func):
            olds, news = ([part for part in one if part not in two] for one, two in (parts, parts[::-1]))
            if not olds:  # two arguments were swapped
                olds, news = ([o for o, n in zip(*both, strict=True) if o != n] for both in (parts, parts[::-1]))
            return tuple(_short(f"{name}(.. {', '.join(each)} ..)") for each in (olds, news))  # type: ignore[return-value]
    if isinstance(old, ast.Dict) and isinstance(new, ast.Dict):
        lines = [[f"{_key(k)}{ast.unparse(v)}" for k, v in zip(d.keys, d.values, strict=True)] for d in (old, new)]
        olds, news = ([part for part in one if part not in two] for one, two in (lines, lines[::-1]))
        return _short("{.. " + ", ".join(olds) + " ..}"), _short("{.. " + ", ".join(news) + " ..}")
    return _short(ast.unparse(old)), _short(ast.unparse(new))


def _key(node: ast.expr | None) -> str:
    return "**" if node is None else f"{ast.unparse(node)}: "


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:100]} ... {text[-55:]}"
