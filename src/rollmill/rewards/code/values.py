"""Python values as JSON text that holds only values: no classes, no code, no overridden `__eq__`.

Both sides of the sandbox use this file, so it imports the standard library only. A value is null, a boolean, a string,
a number (including NaN and Infinity, as in Python's json), or a list [tag, ...]:

    [i, hex] int    [c, re, im] complex   [b, hex] bytes   [a, hex] bytearray
    [l, ...] list   [t, ...] tuple        [s, ...] set     [z, ...] frozenset   [d, key, value, ...] dict
    [r, start, stop, step] range          [g, ...] values of an iterator        [o, type] anything else

A subclass of one of these is encoded as its built-in type, by the methods of that type.
"""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 64
"""Levels of nested containers."""
MAX_VALUES = 1_000_000
"""Values in one value."""
_EXACT = 1 << 53
_ALIKE = 1000
"""Keys or members with one hash: building a set or a mapping of n of them takes O(n^2) time."""
_PLAIN: dict[Any, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}


class TooLargeError(ValueError):
    """A value that is too deep or too large to be encoded."""


class Opaque:
    """Stands for an object that is not a value; equal only to itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def encode(value: Any) -> Any:
    """Return the JSON tree of a value. Raises TooLargeError."""
    return _tree(value, 0, [MAX_VALUES])


def encode_text(value: Any) -> str:
    """Return the JSON text of a value. Raises TooLargeError."""
    return json.dumps(encode(value), separators=(",", ":"))


def decode(tree: Any) -> Any:
    """Decode a JSON tree into new objects. Raises ValueError if it is not an encoded value."""
    try:
        return _value(tree, 0)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"not an encoded value: {error}") from None


def foreign_type(tree: Any) -> str | None:
    """Return the type of an object in an encoded value that is not a value; None if there is none."""
    if not isinstance(tree, list) or not tree:
        return None
    if tree[0] == "o":
        return None if tree[1] == Opaque.__name__ else str(tree[1])
    return next((found for each in tree if (found := foreign_type(each)) is not None), None)


def refuse_collisions(members: Sequence[Any]) -> None:
    """Raise ValueError for more members with one hash than expected by chance, TypeError for unhashable ones."""
    if len(members) > _ALIKE and max(Counter(map(hash, members)).values()) > _ALIKE:
        raise ValueError("members that all have the same hash")


def _tree(value: Any, depth: int, left: list[int]) -> Any:
    if depth > MAX_DEPTH:
        raise TooLargeError(f"containers are nested more than {MAX_DEPTH} deep")
    left[0] -= 1
    if left[0] < 0:
        raise TooLargeError(f"more than {MAX_VALUES} values")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        number = int.__add__(value, 0)
        return number if -_EXACT < number < _EXACT else ["i", hex(number)]
    if issubclass(kind, float):
        return float.__mul__(value, 1.0)
    if issubclass(kind, complex):
        plain = complex.__pos__(value)
        return ["c", plain.real, plain.imag]
    if issubclass(kind, bytes | bytearray):
        return ["b", bytes.hex(value)] if issubclass(kind, bytes) else ["a", bytearray.hex(value)]
    if issubclass(kind, dict):
        pairs = itertools.chain.from_iterable(dict.items(value))
        return ["d", *(_tree(each, depth + 1, left) for each in pairs)]
    for base, tag in _PLAIN.items():
        if issubclass(kind, base):
            return [tag, *(_tree(each, depth + 1, left) for each in base.__iter__(value))]
    if kind is range:
        return ["r", *(_tree(each, depth, left) for each in (value.start, value.stop, value.step))]
    if kind in (type({}.keys()), type({}.values()), type({}.items())) or hasattr(kind, "__next__"):
        return ["g", *(_tree(each, depth + 1, left) for each in value)]
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        return _tree(value.tolist(), depth, left)
    return ["o", str(kind.__name__)[:100]]


def _value(tree: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"containers are nested more than {MAX_DEPTH} deep")
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    tag, *rest = tree
    if tag == "i":
        return int(rest[0], 16)
    if tag == "c":
        return complex(*rest)
    if tag in ("b", "a"):
        return (bytes if tag == "b" else bytearray).fromhex(rest[0])
    if tag == "o":
        return Opaque(str(rest[0]))
    items = [_value(each, depth + 1) for each in rest]
    if tag == "d":
        refuse_collisions(items[::2])
        return dict(zip(items[::2], items[1::2], strict=True))
    if tag == "r":
        return range(*items)
    if tag in ("s", "z"):
        refuse_collisions(items)
    kinds: Any = {"l": list, "t": tuple, "s": set, "z": frozenset, "g": iter}
    return kinds[tag](items)
