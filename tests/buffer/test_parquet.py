"""Groups as Parquet: bit for bit there and back, and into other runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.buffer_groups import awkward, experience, group, ids, same, same_groups

from rollmill.buffer.base import EXPLORER, FEEDBACK, IMPORTED, ExperienceKind, Group
from rollmill.buffer.parquet import import_groups, read_parquet, write_parquet
from rollmill.buffer.row_codec import decode_experience_columns, encode_experience_columns
from rollmill.errors import ConfigError, RollmillError, StoreError
from rollmill.types import Experience

RUN = "0123456789abcdef"


def everything() -> list[Group]:
    return [
        group("a"),
        Group("none", [], created_at=3.0),
        Group("odd", [awkward(), experience()], ExperienceKind.EXPERT, 0.25, FEEDBACK, "Z\0\ud800", 2.5, {"x": [1]}),
        group("b", rewards=(None, float("nan"), float("-inf"))),
    ]


def test_groups_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "all.parquet"
    assert write_parquet(iter(everything()), path, run_id=RUN) == 4
    assert same_groups(list(read_parquet(path)), everything())
    assert [each.name for each in path.parent.iterdir()] == ["all.parquet"]


def test_groups_are_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.buffer.parquet._ROW_GROUP_BYTES", 5000)
    groups = [group(f"g{i}", rewards=(1.0, 0.0, 0.5)) for i in range(20)]
    write_parquet(groups, tmp_path / "x.parquet", run_id=RUN)
    import pyarrow.parquet as pq

    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 10
    assert same_groups(list(read_parquet(tmp_path / "x.parquet")), groups)


def test_other_tools_read_it(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_parquet([group("a", version=3)], tmp_path / "x.parquet", run_id=RUN)
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert rows[0]["token_ids"] == [0, 1, 2, 3, 4, 5]
    assert rows[0]["versions"] == [-1, -1, 3, 3, 3, 3]
    assert (rows[0]["prompt"], rows[0]["response"], rows[0]["task"]) == ("1+1=", "2", "task of a/0")


def test_groups_of_another_run_get_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet([group("a"), group("f", writer=FEEDBACK, kind=ExperienceKind.EXPERT)], path, run_id=RUN)
    assert ids(list(import_groups(path, RUN))) == ["a", "f"]
    found = list(import_groups(path, "another"))
    assert ids(found) == ["01234567-a", "01234567-f"]
    assert [each.writer for each in found] == [IMPORTED, FEEDBACK]
    assert {each.group for each in found[0].experiences} == {"01234567-a"}
    assert found[0].experiences[0].id == "01234567-a/0"
    assert group("a").writer == EXPLORER


def test_feedback_on_another_run_is_about_its_completions(tmp_path: Path) -> None:
    """Runs name their completions alike: another run's ratings must not become those of this one."""
    path, info = tmp_path / "x.parquet", {"act": "rate", "rating": 0.5, "step": 3, "group": "main-1", "task": "t"}
    info |= {"of": ["main-1/0"], "slot": "rate main-1/0", "replaces": ["feedback-1"]}
    write_parquet(
        [Group("feedback-2", [experience()], ExperienceKind.RATED, writer=FEEDBACK, info=info)], path, run_id=RUN
    )
    [own], [foreign] = import_groups(path, RUN), import_groups(path, "another")
    assert own.info == info
    assert foreign.info == {"act": "rate", "rating": 0.5, "task": "t", "group": "01234567-main-1"} | {
        "of": ["01234567-main-1/0"],
        "slot": "01234567-rate main-1/0",
        "replaces": ["01234567-feedback-1"],
    }


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet([group("a")], path, run_id=RUN, tokenizer="aa")
    assert ids(list(import_groups(path, RUN, "aa"))) == ids(list(import_groups(path, RUN))) == ["a"]
    with pytest.raises(StoreError, match=r"another tokenizer \(aa\) than this run's \(bb\)"):
        list(import_groups(path, "another", "bb"))


def test_what_is_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    other, damaged = tmp_path / "other.parquet", tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"a": [1]}), other)
    with pytest.raises(StoreError, match="was not made by `rollmill buffer export`"):
        list(read_parquet(other))
    write_parquet(everything(), damaged, run_id=RUN)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    for read in (read_parquet, lambda path: import_groups(path, RUN)):
        with pytest.raises(StoreError, match="cannot be read as an export of a buffer"):
            list(read(damaged))
        with pytest.raises(StoreError, match="cannot be read"):
            list(read(tmp_path / "missing.parquet"))
    with pytest.raises(RollmillError, match="cannot write"):
        write_parquet([], other / "x.parquet", run_id=RUN)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollmill\[data\]'"):
        list(read_parquet(other))


@given(st.data(), st.lists(st.integers(0, 40), max_size=5))
def test_rows_keep_every_bit(data: st.DataObject, sizes: list[int]) -> None:
    made = [_drawn(data, size) for size in sizes]
    found = decode_experience_columns(_Row(encode_experience_columns(made)))
    assert len(found) == len(made)
    assert all(map(same, found, made))


def test_experiences_of_a_row_can_be_changed_each_by_itself() -> None:
    first, second = decode_experience_columns(_Row(encode_experience_columns([experience(), experience()])))
    for name in ("token_ids", "logprobs", "versions", "action_mask"):
        getattr(first, name)[:] = 1
    assert same(second, experience())


def _drawn(data: st.DataObject, size: int) -> Experience:
    made = experience(tokens=size)
    made.token_ids = data.draw(arrays.arrays("int32", size))
    made.versions = data.draw(arrays.arrays("int32", size, elements=st.sampled_from([-1, 0, 1, 2**31 - 1, -(2**31)])))
    made.action_mask = data.draw(arrays.arrays("bool", size))
    bits = data.draw(arrays.arrays("uint32", size))
    made.logprobs = bits.view("float32")
    made.advantage = data.draw(st.none() | st.just(made.logprobs[::-1].copy()))
    made.info = data.draw(st.dictionaries(st.text(), st.floats() | st.text() | st.integers() | st.none()))
    made.role, made.episode, made.anchor, made.rejected = data.draw(st.tuples(*[st.none() | st.text()] * 4))
    made.step_reward, made.greedy_reward = data.draw(st.tuples(*[st.none() | st.floats()] * 2))
    made.response = data.draw(st.text(st.characters()))
    return made


class _Row:
    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__ = values
