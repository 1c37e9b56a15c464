"""What values become on their way out of the sandbox, and what counts as equal to them."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.rewards.code.comparison import OutputMatchOptions, outputs_match, values_match
from rollmill.rewards.code.values import MAX_DEPTH, Opaque, TooLargeError, decode, encode, encode_text

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=20,
)


def through(value: Any) -> Any:
    return decode(json.loads(encode_text(value)))


def sent(value: Any) -> Any:
    """The tree that arrives for a value."""
    return json.loads(encode_text(value))


@pytest.mark.slow
@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = through(value)
    assert repr(found) == repr(value) or found == value
    assert type(found) is type(value)


@given(values)
def test_every_value_is_the_same_as_itself(value: Any) -> None:
    if "j" not in repr(value) or "nan" not in repr(value):
        assert values_match(value, sent(value), OutputMatchOptions(tolerance=0.0, tuples_as_lists=False))


@given(values, values)
def test_what_python_finds_different_is_different(one: Any, other: Any) -> None:
    if "nan" not in repr(one) and values_match(
        one, sent(other), OutputMatchOptions(tolerance=0.0, tuples_as_lists=False)
    ):
        assert one == other


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        (True, 1, False),
        (1, True, False),
        (0, False, False),
        (0, None, False),
        (1, 1.0, True),
        (1.0, 1, True),
        (1, 1.0000001, False),
        (1.0, 1.0000001, True),
        (1.0, 1.00001, False),
        (1e300, 10**400, False),
        (10**16, 1e16, True),
        (10**16 + 1, 1e16, False),
        (10**400, 10**400, True),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (0.0, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1e308, False),
        (0.0, -0.0, True),
        ("1", 1, False),
        (1, "1", False),
        ("", None, False),
        ("a", b"a", False),
        (b"a", bytearray(b"a"), False),
        ([1, 2], [2, 1], False),
        ([1, 2], [1, 2, 3], False),
        ([1, 2, 3], [1, 2], False),
        ([1, 2], (1, 2), True),
        ([], {}, False),
        ([], set(), False),
        ([], "", False),
        ([], None, False),
        ([1, 2], range(1, 3), False),
        ([1, 2], iter([1, 2]), False),
        ([[1.0], {"a": (2,)}], [(1.0,), {"a": [2]}], True),
        ({1, 2}, frozenset({2, 1}), True),
        ({1, 2}, [1, 2], False),
        ({1, 2}, {1, 3}, False),
        ({0}, {False}, False),
        ({(1, 2)}, {(1, 2)}, True),
        ({math.nan}, {math.nan}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        ({1: 2}, {True: 2}, False),
        ({1: 2}, {1.0: 2}, True),
        ({1: "a"}, {"1": "a"}, False),
        (range(3), range(0, 3, 1), True),
        (1 + 2j, 1 + 2j, True),
        (1 + 2j, 1, False),
    ],
)
def test_what_is_the_same(expected: Any, found: Any, same: bool) -> None:
    assert values_match(expected, sent(found), OutputMatchOptions()) is same


def test_tuples_and_lists_can_be_told_apart() -> None:
    strict = OutputMatchOptions(tuples_as_lists=False)
    assert not values_match([1, 2], sent((1, 2)), strict)
    assert not values_match((1, 2), sent([1, 2]), strict)
    assert values_match((1, [2]), sent((1, [2])), strict)


class Liar:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class LyingInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 42

    def __repr__(self) -> str:
        return "42"

    __str__ = __repr__


class LyingList(list[Any]):
    def __iter__(self) -> Any:
        return iter([42])

    def __eq__(self, other: object) -> bool:
        return True


def test_subclasses_are_what_they_are_underneath() -> None:
    assert through(LyingInt(5)) == 5
    assert type(through(LyingInt(5))) is int
    assert through(LyingList([1, 2])) == [1, 2]
    assert through(OrderedDict(a=1)) == {"a": 1}
    assert through(Counter("aab")) == {"a": 2, "b": 1}
    assert through(namedtuple("Point", "x y")(1, 2)) == (1, 2)
    assert list(through(x for x in (1, 2))) == [1, 2]
    assert list(through({1: 2}.items())) == [(1, 2)]


@pytest.mark.parametrize("expected", [None, True, 0, 1.0, "x", [], [1], (), {}, set(), b"", range(2)])
def test_other_objects_are_the_same_as_nothing(expected: Any) -> None:
    found = sent(Liar())
    assert isinstance(decode(found), Opaque)
    assert not values_match(expected, found, OutputMatchOptions())
    assert not values_match([expected], [*sent([]), found], OutputMatchOptions())


@pytest.mark.slow
def test_endless_and_deep_values_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (deep, cycle, [0] * 1_000_001, iter(int, 1)):
        with pytest.raises(TooLargeError):
            encode(value)


FORGED = [
    *([], ["l", ["i"]], ["i", "zz"], ["i"], ["i", 1.5], ["q", 1], [["l"]], {}, {"l": 1}, ["f", 1.0], ["c", []]),
    *(
        ["d", 1],
        ["d", ["l"], 1],
        ["s", ["l"]],
        ["r", "a"],
        ["r", 1, 2, 0],
        ["b", "zz"],
        ["c", "1"],
        [None],
        ["i", "f" * 10**6],
    ),
]


@pytest.mark.parametrize("tree", FORGED, ids=lambda tree: repr(tree)[:20])
@pytest.mark.parametrize("expected", [None, 0, 1.0, "x", [], [[]], {1: 2}, {1}, b"a", 1j, range(3)])
def test_forged_trees_are_no_value(tree: Any, expected: Any) -> None:
    """Nothing but a ValueError comes out of them, and no equality that is not one."""
    try:
        same = values_match(expected, tree, OutputMatchOptions())
    except ValueError:
        same = False
    assert not same or decode(tree) == expected


def test_members_of_one_hash_are_refused_before_they_cost_time() -> None:
    same_hash = [k * ((1 << 61) - 1) for k in range(1, 20_000)]
    for tag in ("s", "z"):
        with pytest.raises(ValueError, match="same hash"):
            decode([tag, *(["i", hex(each)] for each in same_hash)])
    with pytest.raises(ValueError, match="same hash"):
        values_match(set(range(len(same_hash))), ["s", *(["i", hex(each)] for each in same_hash)], OutputMatchOptions())


@pytest.mark.parametrize(
    ("compare", "expected", "found", "same"),
    [
        ("lines", "1 2\n3\n", "1  2 \n3", True),
        ("lines", "1 2\n3\n", "1 2 3", False),
        ("lines", "1\n2", "1\n\n2", False),
        ("lines", "a", "A", False),
        ("lines", "1\r\n2\r\n", "1\n2\n", True),
        ("lines", "1.0", "1", False),
        ("lines", "", "\n\n", True),
        ("lines", "", "0", False),
        ("lines", "0", "", False),
        ("exact", "1\n", "1\n", True),
        ("exact", "1\n", "1", False),
        ("tokens", "1 2\n3", "1\n2 3\n", True),
        ("tokens", "1 2 3", "1 2 3 4", False),
        ("tokens", "1 2 3", "1 2", False),
        ("tokens", "0.5", "0.50000001", True),
        ("tokens", "0.5", "5e-1", True),
        ("tokens", "0.5", "0.51", False),
        ("tokens", "1000000007", "1000000008", False),
        ("tokens", "5", "5.0", False),
        ("tokens", "nan", "nan", True),
        ("tokens", "1.5", "nan", False),
        ("tokens", "inf", "infinity", False),
        ("tokens", "1.5", "YES", False),
    ],
)
def test_outputs_of_programs(compare: Any, expected: str, found: str, same: bool) -> None:
    assert outputs_match(expected, found, OutputMatchOptions(compare=compare)) is same
