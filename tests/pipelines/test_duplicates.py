"""Exact and near duplicates, within a group and over a run."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_up import context, group, ids, pipeline, process

from rollmill.errors import ConfigError
from rollmill.pipelines import Pipeline
from rollmill.pipelines.builtin.deduplication import LRUCache, text_ngrams

LONG = "Six times two is twelve, because two and two and two and two and two and two make twelve in all."
NEAR = LONG.replace("in all", "altogether")
OTHER = "There is no way to know how many apples were in the basket before somebody ate one of them."
CHINESE = "六乘以二等于十二，因为二加二加二加二加二加二一共是十二，所以答案是十二。"


def texts(*values: str, name: str = "g0", task: str = "t0") -> list[Any]:
    return group([1.0] * len(values), text=list(values), name=name, task=task)


def run(made: Pipeline, experiences: list[Any]) -> list[str]:
    return ids(asyncio.run(made.process(experiences, context())))


def test_the_first_of_equal_texts_stays() -> None:
    found, report = process("duplicates", texts("it is 12", " it  is\n12 ", "It is 12", "it is 13"))
    assert (ids(found), report.reasons) == (["g0/0", "g0/2", "g0/3"], {"duplicate": 1})
    ignoring = {"name": "duplicates", "ignore_case": True}
    assert ids(process(ignoring, texts("it is 12", "It Is 12"))[0]) == ["g0/0"]


def test_composed_and_decomposed_letters_are_the_same_and_superscripts_are_not() -> None:
    assert len(process("duplicates", texts("caf\u00e9", "cafe\u0301"))[0]) == 1
    assert len(process("duplicates", texts("x\u00b2", "x2"))[0]) == 2


@pytest.mark.parametrize(("within", "kept"), [("group", 3), ("task", 2), ("run", 1)])
@pytest.mark.parametrize("name", ["duplicates", "near_duplicates"])
def test_where_a_duplicate_counts(name: str, within: str, kept: int) -> None:
    made = pipeline({"name": name, "within": within})
    first = run(made, texts(LONG, name="g0", task="t0"))
    again = run(made, texts(LONG, name="g1", task="t0"))
    other = run(made, texts(LONG, name="g2", task="t1"))
    assert len(first + again + other) == kept


@pytest.mark.parametrize("name", ["duplicates", "near_duplicates"])
def test_the_memory_is_bounded(name: str) -> None:
    made = pipeline({"name": name, "within": "run", "memory": 2})
    assert run(made, texts("one apple", "two pears and a plum", "three", name="g0")) == ["g0/0", "g0/1", "g0/2"]
    assert len(made.state_dict()[name]["seen"]) == 2
    assert run(made, texts("one apple", "three", name="g1")) == ["g1/0"]  # the first was forgotten, the last was not


@pytest.mark.parametrize("unit", ["words", "characters"])
def test_near_duplicates(unit: str) -> None:
    options = {"name": "near_duplicates", "unit": unit, "ngram": 3 if unit == "words" else 5, "threshold": 0.5}
    found, report = process(options, texts(LONG, NEAR, OTHER))
    assert (ids(found), report.reasons) == (["g0/0", "g0/2"], {"near duplicate": 1})
    chinese = texts(CHINESE, CHINESE.replace("所以", "因此"), "苹果有多少个，谁也不知道。")
    assert ids(process(options, chinese)[0]) == ["g0/0", "g0/2"]


def test_the_threshold_is_a_similarity() -> None:
    one, other = text_ngrams(LONG, "words", 3), text_ngrams(NEAR, "words", 3)
    similarity = len(one & other) / len(one | other)
    for threshold, kept in ((similarity - 0.15, 1), (similarity + 0.12, 2)):
        options = {"name": "near_duplicates", "threshold": threshold, "permutations": 512}
        assert len(process(options, texts(LONG, NEAR))[0]) == kept


def test_empty_and_short_texts() -> None:
    assert len(process("near_duplicates", texts("", "", "12", "13", "12"))[0]) == 3
    assert text_ngrams("", "words", 3) == {b""}
    assert text_ngrams("ab", "characters", 5) == {b"ab"}


@pytest.mark.slow
@given(st.lists(st.sampled_from(["", "a", "it is 12", LONG, NEAR, OTHER, CHINESE, "\udcff"]), max_size=8), st.data())
def test_a_resumed_run_drops_the_same(values: list[str], data: Any) -> None:
    sections = [{"name": name, "within": "run", "memory": 3} for name in ("duplicates", "near_duplicates")]
    groups = [(value, f"g{index}") for index, value in enumerate(values)]
    whole = pipeline(*sections)
    expected = [run(whole, texts(value, name=name)) for value, name in groups]
    cut = data.draw(st.integers(0, len(groups)))
    before = pipeline(*sections)
    found = [run(before, texts(value, name=name)) for value, name in groups[:cut]]
    after = pipeline(*sections)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    found += [run(after, texts(value, name=name)) for value, name in groups[cut:]]
    assert found == expected
    assert after.state_dict() == whole.state_dict()


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match=r"near_duplicates` needs datasketch: pip install 'rollmill\[dedup\]'"):
        pipeline("near_duplicates")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans())), st.integers(1, 4))
def test_a_memory_forgets_what_was_not_touched_for_longest(steps: list[tuple[str, bool]], size: int) -> None:
    memory: LRUCache[int] = LRUCache(size)
    order: list[str] = []
    for key, put in steps:
        known = key in order
        assert (memory.put(key, 1) is not None) if put else ((memory.get(key) is not None) is known)
        if put or known:
            order = [*(each for each in order if each != key), key][-size:]
        assert list(memory) == order
        assert len(memory) == len(order) <= size
