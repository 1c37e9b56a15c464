"""Finds the applications, so that the core need not know them: commands that they add, and what they do at its hooks.

An application is a package of `rollmill.apps`. Its `__init__` imports nothing slow and has COMMANDS (command ->
"module:function") and HOOKS (hook -> "module:function"), or one of them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal

Hook = Literal["write_run_report", "write_bench_report", "notebook_view"]
"""Where the core calls applications: with a run's folder when it has ended; with the folder, results and comparisons of
`rollmill bench`; with a number of completions, for the RunView of a run that a notebook's cell starts."""


@cache
def _declared(what: Literal["COMMANDS", "HOOKS"]) -> dict[str, str]:
    folders = import_module("rollmill.apps").__path__
    packages = [import_module(f"rollmill.apps.{each.name}") for each in pkgutil.iter_modules(folders)]
    return {name: place for package in packages for name, place in getattr(package, what, {}).items()}


def application_commands() -> dict[str, str]:
    """Return the commands that applications add: name -> "module:function"."""
    return dict(_declared("COMMANDS"))


def call_hook(hook: Hook, *arguments: Any) -> Any:
    """Call what an application has for a hook, and return its result; None if there is no such application."""
    if (place := _declared("HOOKS").get(hook)) is None:
        return None
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function(*arguments)
