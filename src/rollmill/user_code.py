"""Imports of users' Python code by name. Needs no section of a run file, so that a grader process starts quickly."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from hashlib import sha1, sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rollmill.errors import ConfigError
from rollmill.files import atomic_write, describe_non_file

STORED = ".pkl"  #: suffix of the file of an object that no module defines under a name
_stored: dict[str, Any] = {}


def import_object(spec: str) -> Any:
    """Import `FILE.py:NAME`, `package.module:NAME`, or `FILE.pkl:NAME` of `store_object`. A file is read once per
    process.

    Raises ConfigError when the file, the module or the name does not exist, or when importing it fails.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"`{spec}`: expected FILE.py:NAME or package.module:NAME")
    if source.endswith(STORED):
        return _load_stored(Path(source), name)
    module = import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{source} defines no `{name}`{did_you_mean(name, public)}; correct the name after the colon")
    return getattr(module, name)


def function_source(name: str, function: Callable[..., Any]) -> str | None:
    """Return the `spec` by which `import_object` finds a function or class in another process; None if it cannot.

    `name` is its name in the run file. What is registered by name is looked up in its module.
    """
    source, _, attribute = name.rpartition(":")
    if source:
        return f"{Path(source).absolute()}:{attribute}" if source.endswith((".py", STORED)) else name
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or function.__module__ == "__main__" or getattr(module, function.__name__, None) is not function:
        return None
    return f"{file}:{function.__name__}"


def store_object(folder: Path, target: Any, name: str) -> str:
    """Write an object that no file defines under a name, such as a closure or a function of a notebook, and return its
    reference `FILE.pkl:NAME`.

    Later imports of the reference in this process give the object itself, in others a copy. Files are named by their
    contents, so writing again changes none.

    Raises ConfigError naming the object if it cannot be pickled.
    """
    import cloudpickle

    try:
        data = cloudpickle.dumps({name: target})
    except Exception as error:  # pickling runs methods of any class
        advice = "create what cannot be copied (files, connections, locks, models) inside the function"
        raise ConfigError(f"`{name}` cannot be pickled: {type(error).__name__}: {error}; {advice}") from error
    path = folder.absolute() / f"{name}-{sha256(data).hexdigest()[:8]}{STORED}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data, durable=True)
    _stored[str(path)] = {name: target}
    return f"{path}:{name}"


def _load_stored(path: Path, name: str) -> Any:
    key = str(path.absolute())
    if key not in _stored:
        if what := describe_non_file(path):
            raise ConfigError(f"{path}: {what}; correct the path")
        try:
            _stored[key] = pickle.loads(path.read_bytes())
        except Exception as error:  # imports modules, and runs their code
            text = f"{path}: cannot be loaded: {type(error).__name__}: {error}"
            advice = "it needs the Python version and the modules that it was written with"
            raise ConfigError(f"{text}; {advice}") from error
    found = _stored[key]
    if not isinstance(found, dict) or name not in found:
        known = found if isinstance(found, dict) else ()
        raise ConfigError(f"{path} holds no `{name}`{did_you_mean(name, known)}; correct the name after the colon")
    return found[name]


def import_file(path: Path) -> ModuleType:
    """Import a Python file (a plugin, or the file of FILE.py:NAME), once per process; its folder becomes importable.

    Raises ConfigError naming the file and the line that failed.
    """
    path = path.absolute()
    name = f"rollmill_user_{path.stem}_{sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if what := describe_non_file(path):
        raise ConfigError(f"{path}: {what}; correct the path")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, ConfigError):  # raised by a decorator, with file and line
            raise
        raise ConfigError(_import_failure(path, error)) from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = "" if error.name == name else f" (it needs `{error.name}`)"
        raise ConfigError(f"module `{name}` cannot be imported{missing}; install it or write FILE.py:NAME") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing `{name}` failed: {type(error).__name__}: {error}") from error


def _import_failure(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        place = f"{error.filename or path}" + (f":{error.lineno}" if error.lineno else "")
        return f"{place}: syntax error: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f"{path}:{lines[-1]}" if lines else str(path)
    return f"{place}: importing it failed: {type(error).__name__}: {error}"


def did_you_mean(word: str, known: Any) -> str:
    """Suggest the known name that is closest to a word; empty if none is close."""
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
