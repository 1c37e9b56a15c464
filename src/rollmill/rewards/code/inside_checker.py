"""Runs inside a separate session: a task's check code. Calls of the model's functions go through the host."""

import builtins
import json
from typing import Any

from rollmill.rewards.code.inside_candidate import RawRepr
from rollmill.rewards.code.values import TooLargeError, decode, encode, foreign_type

_names: dict[str, Any] = {"__name__": "check"}
_raised: list[BaseException] = []


class SolutionStoppedError(BaseException):
    """The model's code returned nothing that a check can use. `except Exception` does not catch this."""


class NotAValueError(BaseException):
    """The check passes something to the model's code that is not a value."""


def prepare(setup: str, names: list[str], host: Any) -> None:
    """Run the setup code, then define `names` as the model's functions."""
    exec(compile(setup, "setup.py", "exec", dont_inherit=True), _names)
    for name in names:
        _names[name] = _function(name, host)


def check(code: str) -> RawRepr:
    """Run a check and return "ok", or the outcome and the reason in JSON."""
    _raised.clear()
    try:
        exec(compile(code, "check.py", "exec", dont_inherit=True), _names)
    except MemoryError:
        raise
    except BaseException as error:
        if isinstance(error, SolutionStoppedError) or any(error is each for each in _raised):
            return _result("runtime_error", error)
        in_itself = isinstance(error, NotAValueError | NameError | ImportError | SystemExit)
        return _result("test_error" if in_itself else "wrong_answer", error)
    return RawRepr(json.dumps({"outcome": "ok"}))


def _result(outcome: str, error: BaseException) -> RawRepr:
    return RawRepr(json.dumps({"outcome": outcome, "reason": f"{type(error).__name__}: {str(error)[:500]}"}))


def _function(name: str, host: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = [list(args), kwargs]
        try:
            tree = encode(arguments)
        except TooLargeError as large:
            raise NotAValueError(f"the test passes a value that is too large: {large}") from None
        if (kind := foreign_type(tree)) is not None:
            raise NotAValueError(f"the test passes an object of type {kind}; only built-in values can be passed")
        text = json.dumps([name, json.dumps(tree, separators=(",", ":"))])
        try:
            reply = json.loads(host(text))
            if "arguments" in reply:
                _restore(arguments, decode(reply["arguments"]))
            if "value" in reply:
                return decode(reply["value"])
            error = _exception(str(reply["raised"]), str(reply["text"]))
        except Exception as broken:
            raise SolutionStoppedError(f"{name} returned nothing to check: {broken}") from None
        _raised.append(error)
        raise error

    function.__name__ = name
    return function


def _exception(name: str, text: str) -> Exception:
    """Return the built-in exception of a name. The name comes from the model's process: call nothing else by it."""
    kind = getattr(builtins, name)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        raise ValueError(f"{name} is not an exception")
    for each in kind.__mro__:
        try:
            return each(text)  # type: ignore[no-any-return]
        except TypeError:  # such as UnicodeDecodeError, which takes five arguments
            continue
    raise AssertionError("Exception takes one argument")


def _restore(old: Any, new: Any) -> None:
    """Make `old` equal to `new` in place, as far as it is mutable; objects inside keep their identity."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        old[:] = [_kept(*pair) for pair in zip(old, new)] + new[len(old) :]  # noqa: B905 (one may be longer)
    elif isinstance(old, dict):
        kept = {key: _kept(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(kept)
    elif isinstance(old, tuple):
        for pair in zip(old, new):  # noqa: B905
            _restore(*pair)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new


def _kept(old: Any, new: Any) -> Any:
    """Return `new`, as the same object as `old` if that is mutable."""
    if type(old) is type(new) and isinstance(old, list | dict | set | bytearray | tuple):
        _restore(old, new)
        return old if old == new else new
    return new
