"""Runs inside a session: the model's code, and calls of its functions. Its replies are not trusted."""

import json
import sys
import types
from typing import Any

from rollmill.rewards.code.values import TooLargeError, decode, encode

_NAME = "solution"
_module = types.ModuleType(_NAME)


class RawRepr(str):
    """Text that `repr` shows unchanged."""

    __slots__ = ()
    __repr__ = str.__str__


def load(source: str) -> RawRepr:
    """Run the code and let its exceptions pass.

    The returned text is JSON, with an entry if the code does not compile.
    """
    try:
        code = compile(source, f"{_NAME}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError) as error:
        return RawRepr(json.dumps({"compile_error": str(error)[:500]}))
    sys.modules[_NAME] = _module
    exec(code, _module.__dict__)
    return RawRepr("{}")


def call(name: str, arguments: str, changes: bool) -> RawRepr:
    """Call a function with encoded [args, kwargs]. The returned text is JSON with `value`, `raised` or `too_large`.

    With `changes`, `arguments` is included if the call has changed them in place.
    """
    args, kwargs = decode(json.loads(arguments))
    before = encode([args, kwargs]) if changes else None
    try:
        reply: dict[str, Any] = {"value": encode(_named(name)(*args, **kwargs))}
    except TooLargeError as error:
        reply = {"too_large": str(error)}
    except MemoryError:
        raise
    except Exception as error:
        builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        reply = {"raised": builtin.__name__, "text": str(error)[:1000]}
    after = encode([args, kwargs]) if changes else None
    if after != before:
        reply["arguments"] = after
    return RawRepr(json.dumps(reply, separators=(",", ":")))


def _named(name: str) -> Any:
    """Return the function, or the method of a new object of its class."""
    owner, *names = name.split(".")
    if owner not in _module.__dict__:
        raise NameError(f"the code defines no {owner!r}")
    found = _module.__dict__[owner]
    for each in names:
        found = getattr(found() if isinstance(found, type) else found, each)
    return found
