"""Finds the applications, so that the core need not know them: commands and functions that they add, and hooks.

An application is a package of `rollmill.apps`. Its `__init__` imports nothing slow and has some of COMMANDS (command ->
"module:function"), FUNCTIONS (public name of `rollmill` -> "module:function") and HOOKS (hook -> "module:function").
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal

Hook = Literal["write_run_report", "write_bench_report", "notebook_view", "policy_server"]
"""Moments at which the core calls applications: with a run's folder when it has ended; with the folder, results and
comparisons of `rollmill bench`; with a number of completions, for the RunView of a run that a notebook's cell starts;
with an engine, its chat renderer, its context and a deadline, for the PolicyServer of workflows with `endpoint`."""


@cache
def _declared(what: Literal["COMMANDS", "FUNCTIONS", "HOOKS"]) -> dict[str, str]:
    folders = import_module("rollmill.apps").__path__
    packages = [import_module(f"rollmill.apps.{each.name}") for each in pkgutil.iter_modules(folders)]
    return {name: place for package in packages for name, place in getattr(package, what, {}).items()}


def application_commands() -> dict[str, str]:
    """Return the commands that applications add: name -> "module:function"."""
    return dict(_declared("COMMANDS"))


def find_application(what: Literal["COMMANDS", "FUNCTIONS", "HOOKS"], name: str) -> Callable[..., Any] | None:
    """Import what an application has under a name; None if there is no such application."""
    if (place := _declared(what).get(name)) is None:
        return None
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def call_hook(hook: Hook, *arguments: Any) -> Any:
    """Call what an application has for a hook, and return its result; None if there is no such application."""
    function = find_application("HOOKS", hook)
    return None if function is None else function(*arguments)
