"""Applies a mutant in a process that has already loaded the module."""

from __future__ import annotations

import ast
import copy
import gc
import sys
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bench.mutation.mutants import Mutant


class LoadError(Exception):
    """The module could not be imported with the change."""


_REACHED = "__reached_by_test__"


@dataclass
class Live:
    """Live objects that come from a file."""

    functions: list[FunctionType] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)  #: functions with `lru_cache`


def live_objects(files: set[str]) -> dict[str, Live]:
    """Find live objects by file."""
    found = {file: Live() for file in files}
    gc.unfreeze()
    for each in gc.get_objects():
        cached = type(each).__name__ == "_lru_cache_wrapper"
        function = each.__wrapped__ if cached else each
        if type(function) is FunctionType and function.__code__.co_filename in found:
            live = found[function.__code__.co_filename]
            (live.caches if cached else live.functions).append(each)
    gc.freeze()  # forked processes share these pages
    return found


def install(mutant: Mutant, tree: ast.Module, module: ModuleType, live: Live) -> None:
    """Make the change in `tree`, and apply it to the module's live objects.

    Functions keep their identity and get new code, so that importers, tables and partial functions see the change.
    Constants and default values are evaluated again.
    """
    mutant.apply()
    ast.fix_missing_locations(tree)
    if mutant.inside:
        replace_code(tree, module, live)
    else:
        _reload(mutant, module, live.functions)


def note_lines(tree: ast.Module, module: ModuleType, live: Live) -> set[int]:
    """Let every function record the lines of the statements that it reaches, in the returned set.

    Unlike a trace function, this does not slow down other code. `replace_code` with the original tree undoes it.
    """
    reached: set[int] = set()
    vars(module)[_REACHED] = reached
    noting = copy.deepcopy(tree)
    for node in ast.walk(noting):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _note_in(node)
    replace_code(ast.fix_missing_locations(noting), module, live)
    return reached


def _note_in(node: ast.AST) -> None:
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        statements = getattr(node, name, None)
        if not isinstance(statements, list):
            continue
        noted: list[ast.AST] = []
        for each in statements:
            if isinstance(each, ast.stmt):
                noted.append(ast.copy_location(ast.parse(f"{_REACHED}.add({each.lineno})").body[0], each))
            noted.append(each)
            if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                _note_in(each)
        setattr(node, name, noted)


def replace_code(tree: ast.Module, module: ModuleType, live: Live) -> None:
    """Replace the code of all functions of a module by that of `tree`."""
    codes: dict[tuple[str, int], CodeType] = {}
    _collect(compile(tree, str(module.__file__), "exec"), codes)
    for function in live.functions:
        code = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            function.__code__ = code
    for cache in live.caches:
        cache.cache_clear()


def _collect(code: CodeType, into: dict[tuple[str, int], CodeType]) -> None:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            into[each.co_qualname, each.co_firstlineno] = each
            _collect(each, into)


def _reload(mutant: Mutant, module: ModuleType, functions: list[FunctionType]) -> None:
    """Evaluate default values, or the value of an assignment, and replace the old ones."""
    owner, namespace = mutant.owner, vars(module)

    def value(node: ast.expr) -> Any:
        code = compile(ast.fix_missing_locations(ast.Expression(node)), str(module.__file__), "eval")
        try:
            return eval(code, namespace)
        except Exception as error:
            raise LoadError(ast.unparse(node)) from error

    if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = owner.args
        qualified = mutant.function
        for function in functions:
            if function.__code__.co_qualname == qualified:
                function.__defaults__ = tuple(map(value, arguments.defaults)) or None
                pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                function.__kwdefaults__ = {name.arg: value(node) for name, node in pairs if node is not None}
        return
    assert isinstance(owner, ast.Assign | ast.AnnAssign)
    assert owner.value is not None
    target = owner.targets[0] if isinstance(owner, ast.Assign) else owner.target
    assert isinstance(target, ast.Name)
    new = value(owner.value)
    if mutant.cls:
        _set_field(namespace[mutant.cls], target.id, new)
        return
    old = namespace[target.id]
    if isinstance(old, dict):
        old.clear()
        old.update(new)
        return
    for other in list(sys.modules.values()):  # all modules that imported the constant
        if getattr(other, "__name__", "").startswith("rollmill") and vars(other).get(target.id) is old:
            setattr(other, target.id, new)


def _set_field(cls: type, name: str, value: Any) -> None:
    """Change the default of a field of a data class or a named tuple, or an attribute of a class."""
    maker = cls.__new__ if issubclass(cls, tuple) else vars(cls).get("__init__")
    if isinstance(maker, FunctionType):
        defaults = list(maker.__defaults__ or ())
        names = maker.__code__.co_varnames[: maker.__code__.co_argcount]
        if name in names:
            defaults[names.index(name) - len(names)] = value
            maker.__defaults__ = tuple(defaults)
    if "__slots__" not in vars(cls) and not issubclass(cls, tuple):
        setattr(cls, name, value)
