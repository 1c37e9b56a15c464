"""Optional libraries that a run needs, and that are not installed: `rollmill check` names them before a run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from rollmill.config.loader import LoadedRun
from rollmill.config.tree import KeyPath, format_key_path
from rollmill.errors import ConfigError


def find_missing_extras(run: LoadedRun, installed: Callable[[str], bool] | None = None) -> list[str]:
    """Returns a sentence for each key that needs a library which is not installed, with the command that installs it.

    Args:
        installed: says whether a module can be imported; default: by looking for it.
    """
    known = installed or _is_installed
    found: dict[str, None] = {}
    for prefix, section in _sections(run):
        for path, each in section.walk(prefix):
            for key, (extra, module) in each.extras().items():
                if not known(module):
                    where = format_key_path((*path, key) if key else path)
                    command = f"pip install 'rollmill[{extra}]'"
                    found[f"{where} needs the library {module}, which is not installed: {command}"] = None
    return list(found)


def require_extras(run: LoadedRun, section: str) -> None:
    """Raises ConfigError if a section at the top of the run file needs a library that is not installed."""
    missing = [each for each in find_missing_extras(run) if each.startswith((f"{section}.", f"{section} "))]
    if missing:
        raise ConfigError("\n".join(f"{run.path}: {each}" for each in missing))


def _sections(run: LoadedRun) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the sections of the whole run, and the stages; the first stage's sections are those of the run, too."""
    for key in ("model", "placement", "monitor"):
        yield (key,), getattr(run.config, key)
    for index, stage in enumerate(run.stages):
        yield ("stages", index) if run.config.stages else (), stage


def _is_installed(module: str) -> bool:
    """True if the module can be imported; a folder of its name in the current folder is none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
