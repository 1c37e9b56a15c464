"""Bundles modules of this package for a sandbox session, which can import only the standard library."""

from __future__ import annotations

import marshal
from functools import cache
from pathlib import Path

VALUES, CANDIDATE, CHECKER = "values", "inside_candidate", "inside_checker"
_PACKAGE = __package__
_LOADER = """\
import marshal, sys, types
for name, code in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(marshal.loads(code), module.__dict__)
"""


@cache
def bundle(*names: str) -> str:
    """Return a program that loads these modules, each of which may import those before it. The last one is `module`."""
    modules = [(f"{_PACKAGE}.{name}", _compiled(name)) for name in names]
    return _LOADER.format(modules=modules)


def _compiled(name: str) -> bytes:
    """Compile a module to bytes for the same Python version, which the sandbox runs."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return marshal.dumps(compile(text, f"<{name}>", "exec"))
