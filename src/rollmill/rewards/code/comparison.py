"""Whether what the code gave is what was expected. This runs in the trusted process, on values and text only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rollmill.config.rewards.code import CodeReward, OutputComparison
from rollmill.rewards.code.values import decode, refuse_collisions


@dataclass(frozen=True, slots=True)
class OutputMatchOptions:
    """How alike is alike."""

    compare: OutputComparison = "lines"
    tolerance: float = 1e-6
    tuples_as_lists: bool = True


def output_match_options(config: CodeReward) -> OutputMatchOptions:
    """The rules of a configuration."""
    return OutputMatchOptions(config.compare, config.tolerance, config.tuples_as_lists)


def values_match(expected: Any, found: Any, rules: OutputMatchOptions) -> bool:
    """Whether the encoded value `found` is the value `expected`.

    A truth value is no number. Whole numbers and floats are compared as numbers; `tolerance` holds where the expected
    one is a float. nan is nan. The work is bounded by the size of `expected`, whatever `found` is. Raises ValueError
    where `found` is not an encoded value.
    """
    if expected is None or isinstance(expected, bool):
        return found is expected
    if isinstance(expected, str):
        return isinstance(found, str) and found == expected
    if isinstance(expected, int | float):
        return _same_number(expected, found, rules)
    if not isinstance(found, list) or not found:
        return False
    tag, items = found[0], found[1:]
    if isinstance(expected, list | tuple):
        tags = ("l", "t") if rules.tuples_as_lists else ("l",) if isinstance(expected, list) else ("t",)
        pairs = zip(expected, items, strict=False)
        return tag in tags and len(items) == len(expected) and all(values_match(a, b, rules) for a, b in pairs)
    if isinstance(expected, dict):
        return tag == "d" and len(items) == 2 * len(expected) and _same_mapping(expected, items, rules)
    if isinstance(expected, set | frozenset):
        return tag in ("s", "z") and len(items) == len(expected) and _same_set(expected, items)
    return len(items) < 4 and _same_leaf(expected, decode(found))


def outputs_match(expected: str, found: str, rules: OutputMatchOptions) -> bool:
    """Whether a program's output is the expected one. Time is in proportion to the length of the two."""
    if expected == found:
        return True
    if rules.compare == "exact":
        return False
    if rules.compare == "lines":
        return _same_lines(expected.rstrip(), found.rstrip())
    wanted = expected.split()
    given = found.split(maxsplit=len(wanted))
    return len(wanted) == len(given) and all(
        _same_word(*pair, rules.tolerance) for pair in zip(wanted, given, strict=True)
    )


def _same_number(expected: int | float, found: Any, rules: OutputMatchOptions) -> bool:
    if isinstance(found, list):
        if len(found) != 2 or found[0] != "i":
            return False
        found = decode(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    if found == expected or (found != found and expected != expected):
        return True
    return isinstance(expected, float) and _near(expected, found, rules.tolerance)


def _near(expected: float, found: float, tolerance: float) -> bool:
    try:
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # a whole number larger than any float
        return False


def _same_mapping(expected: dict[Any, Any], items: list[Any], rules: OutputMatchOptions) -> bool:
    keys = [_hashable(decode(key)) for key in items[::2]]
    refuse_collisions(keys)
    found = dict(zip(keys, items[1::2], strict=True))
    wanted = {_hashable(key): value for key, value in expected.items()}
    return wanted.keys() == found.keys() and all(values_match(wanted[key], found[key], rules) for key in wanted)


def _same_set(expected: set[Any] | frozenset[Any], items: list[Any]) -> bool:
    members = [_hashable(decode(item)) for item in items]
    refuse_collisions(members)
    return set(members) == {_hashable(item) for item in expected}


def _hashable(value: Any) -> Any:
    """A key or member that equals what Python finds equal, save truth values and numbers. Raises ValueError."""
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, float) and value != value:
        return "nan", "float"
    try:
        hash(value)
    except TypeError:
        raise ValueError("a member of a set, or a key, that cannot be one") from None
    return (isinstance(value, bool), value)


def _same_leaf(expected: Any, found: Any) -> bool:
    return type(expected) is type(found) and bool(expected == found)


def _same_lines(expected: str, found: str) -> bool:
    """Whether every line has the same words. Lines are counted first: splitting costs more than that."""
    if expected.count("\n") != found.count("\n"):
        return False
    pairs = zip(expected.split("\n"), found.split("\n"), strict=True)
    return all(wanted.split() == given.split() for wanted, given in pairs)


def _same_word(expected: str, found: str, tolerance: float) -> bool:
    """Equal, or both numbers and near; an expected whole number is exact."""
    if expected == found:
        return True
    if expected.lstrip("+-").isdecimal():
        return False
    try:
        wanted, given = float(expected), float(found)
    except ValueError:
        return False
    return math.isfinite(wanted) and math.isfinite(given) and _near(wanted, given, tolerance)
