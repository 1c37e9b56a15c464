"""Tasksets from files: every format, and every way a file can be wrong."""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmill.config.taskset import TasksetConfig
from rollmill.data import Taskset, load_taskset
from rollmill.errors import TasksetError
from rollmill.types import Task

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "response": f"{2 * a}", "level": "easy"} for a in range(5)]


def load(path: Path, **keys: Any) -> Taskset:
    return load_taskset(TasksetConfig(path=path, **keys))


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_parquet(path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(ROWS), path)
    return path


def write_folder(path: Path) -> Path:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS))
    return path


WRITERS = {
    "sums.jsonl": lambda path: write_jsonl(path, ROWS),
    "sums.json": write_json,
    "sums.csv": write_csv,
    "sums.parquet": write_parquet,
    "sums": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_tasks(name: str, tmp_path: Path) -> None:
    taskset = load(WRITERS[name](tmp_path / name))
    assert taskset.name == "sums"
    assert taskset.rejected == []
    assert taskset.tasks[3] == Task("sums:3", "3+3=", "6", "6", {"level": "easy"}, "sums")
    assert [task.prompt for task in taskset.tasks] == [row["prompt"] for row in ROWS]


def test_gsm8k_as_published(data_dir: Path) -> None:
    taskset = load(data_dir / "gsm8k" / "train.jsonl", preset="gsm8k")
    assert (len(taskset.tasks), len(taskset.rejected)) == (7473, 0)
    first = taskset.tasks[0]
    assert isinstance(first.prompt, str)
    assert first.prompt.startswith("Natalia sold clips")
    assert first.answer == "72"
    assert first.response == (
        "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
    )
    assert all(float(task.answer) or task.answer == "0" for task in taskset.tasks)
    assert not any("<<" in (task.response or "") for task in taskset.tasks)


def test_limit_takes_the_first_tasks_and_reads_no_further(tmp_path: Path) -> None:
    taskset = load(write_jsonl(tmp_path / "a.jsonl", [*ROWS, "not json"]), limit=5)
    assert [task.id for task in taskset.tasks] == [f"a:{row}" for row in range(5)]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n\n  \n{"prompt": "y"}')
    assert [(task.id, task.prompt) for task in load(path).tasks] == [("a:0", "x"), ("a:1", "y")]


BAD_LINES = {
    '{"prompt": "x"': "not valid JSON: Expecting ',' delimiter at column 15",
    '["x"]': "expected an object, found list",
    '"x"': "expected an object, found str",
    "null": "expected an object, found NoneType",
    '{"remark": "x"}': "no column prompt (columns: remark); name another in taskset.fields.prompt",
    '{"prompt": " \\n"}': "the prompt is empty",
    '{"prompt": []}': "the prompt is empty",
    '{"prompt": null}': "the prompt (column prompt) is empty (null), not text or a list of messages",
    '{"prompt": 7}': "the prompt (column prompt) is a number, not text or a list of messages",
    '{"prompt": "x", "response": 7}': "the response is a number, not text",
    '{"prompt": "x\\ud800"}': "not valid Unicode text (character 1 is half of a surrogate pair)",
    '{"prompt": ["x"]}': "message 0 of the prompt is not an object with role and content",
    '{"prompt": [{"role": "user"}]}': "message 0 of the prompt is not an object with role and content",
    '{"prompt": [{"role": "user", "content": 3}]}': "role or content of message 0 of the prompt is not text",
    '{"prompt": [{"role": "user", "content": " "}]}': "the prompt is empty (its last message)",
    '{"prompt": [{"role": "user", "content": "x", "weight": 1}]}': "message 0 of the prompt has weight; only",
    '{"prompt": [{"role": "assistant", "content": "x"}]}': "the prompt ends with the assistant's message",
    "[" * 100_000: "not readable JSON",
    '{"prompt": "x", "answer": ' + "9" * 5000 + "}": "not readable JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_a_bad_line_is_refused_by_name_or_skipped_and_kept(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [ROWS[0], line, ROWS[1]])
    with pytest.raises(TasksetError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith("taskset bad: 1 of 3 rows cannot become tasks; correct them, or skip them by ")
    assert f"{path}:2: {BAD_LINES[line]}" in message
    with caplog.at_level(logging.WARNING):
        taskset = load(path, on_bad_row="skip")
    assert [task.id for task in taskset.tasks] == ["bad:0", "bad:2"]
    [row] = taskset.rejected
    assert row.where == f"{path}:2"
    assert BAD_LINES[line] in row.reason
    [record] = caplog.records
    assert record.getMessage().startswith(f"taskset bad: skipped 1 of 3 rows\n  {path}:2: ")


def test_many_bad_lines_are_counted_and_the_first_five_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [*ROWS, *["{"] * 7])
    with pytest.raises(TasksetError, match="7 of 12 rows") as caught:
        load(path)
    lines = str(caught.value).splitlines()
    assert [line.strip().split(": ")[0] for line in lines[1:6]] == [f"{path}:{number}" for number in range(6, 11)]
    assert lines[6:] == ["  and 2 more"]


def test_undecodable_bytes_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(TasksetError, match=r"latin.jsonl:2: not UTF-8 text \(byte 16 of the line\)"):
        load(path)
    table = tmp_path / "latin.csv"
    table.write_bytes(b"prompt,answer\nx,1\ncaf\xe9,2\n")
    assert [row.where for row in load(table, on_bad_row="skip").rejected] == [f"{table}:3"]


def test_csv_rows_of_another_width_and_broken_quotes_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('prompt,answer\n"two\nlines",1\nx\ny,2,3\n\nz,4\n"open,5\n')
    taskset = load(path, on_bad_row="skip")
    assert [(task.id, task.prompt) for task in taskset.tasks] == [("t:0", "two\nlines"), ("t:3", "z")]
    assert [str(row) for row in taskset.rejected] == [
        f"{path}:4: 1 values for 2 columns",
        f"{path}:5: 3 values for 2 columns",
        f"{path}:8: not valid CSV: unexpected end of data",
    ]


def test_a_blank_response_is_no_response(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt,response\nx,\ny,why\n")
    assert [task.response for task in load(path).tasks] == [None, "why"]


def test_missing_files_wrong_kinds_and_empty_tasksets(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "object.json").write_text('{"prompt": "x"}')
    (tmp_path / "lines.json").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "broken.json").write_text('[\n{"prompt": "x"},\n}]')
    (tmp_path / "twice.csv").write_text("prompt,prompt\nx,y\n")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and then nothing of the kind PAR1")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("trian.jsonl", {}, r"trian.jsonl does not exist; did you mean .*train.jsonl\?"),
        ("zzz.jsonl", {}, "zzz.jsonl does not exist; .* holds broken.json, damaged.parquet, "),
        ("none/train.jsonl", {}, "nor does its folder .*none; correct the path"),
        ("rows.txt", {}, "is none of .jsonl, .json, .parquet, .csv nor a folder"),
        ("empty.jsonl", {}, "taskset empty is empty: .*empty.jsonl has no rows"),
        ("empty.csv", {}, "taskset empty is empty"),
        ("object.json", {}, "holds dict, not a list of objects"),
        ("lines.json", {}, "lines.json:2: not valid JSON: Extra data; .* is named .jsonl"),
        ("broken.json", {}, "broken.json:3: not valid JSON"),
        ("twice.csv", {}, "twice.csv:1: two columns have the same name"),
        ("damaged.parquet", {}, "is not a readable Parquet file"),
        ("train.jsonl", {"split": "test"}, "taskset.split: only a folder written by `datasets` has splits"),
        ("", {}, r"not one written by `datasets.save_to_disk`; did you mean .*\?"),
    ]
    for name, keys, message in cases:
        with pytest.raises(TasksetError, match=message):
            load(tmp_path / name, **keys)


def test_a_taskset_whose_rows_were_all_skipped_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 3)
    with pytest.raises(TasksetError, match=r"all 3 rows were skipped\n.*a.jsonl:1: no column prompt \(columns: text\)"):
        load(path, on_bad_row="skip")


NAN = float("nan")
AMBIGUOUS = {
    "a key twice": ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is given twice; keep one"),
    "a key twice inside": ('{"prompt": "a", "more": [{"x": 1, "x": 2}]}', "the key 'x' is given twice; keep one"),
    "NaN": ('{"prompt": "a", "answer": NaN}', "NaN is not JSON; write null, or text"),
    "infinity": ('{"prompt": "a", "answer": -Infinity}', "-Infinity is not JSON"),
    "beyond floats": ('{"prompt": "a", "answer": 1e999}', "1e999 is too large a number"),
    "digits": ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "a number of thousands of digits; write it as text"),
    "deep": ('{"prompt": "a", "answer": ' + "[" * 100 + "]" * 100 + "}", "brackets too deep inside each other"),
}


@pytest.mark.parametrize(("row", "expected"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_rows_with_two_meanings_are_rejected_by_line(row: str, expected: str, tmp_path: Path) -> None:
    lines = ['{"prompt": "x", "answer": "1"}', row]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    taskset = load(tmp_path / "a.jsonl", on_bad_row="skip")
    assert [task.prompt for task in taskset.tasks] == ["x"]
    [rejected] = taskset.rejected
    assert rejected.where == f"{tmp_path}/a.jsonl:2"
    assert expected in rejected.reason
    with pytest.raises(TasksetError, match=r"1 of 2 rows cannot become tasks"):
        load(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", [name for name in AMBIGUOUS if name != "digits"])
def test_entries_of_a_list_with_two_meanings_have_a_line(name: str, tmp_path: Path) -> None:
    row, expected = AMBIGUOUS[name]
    (tmp_path / "a.json").write_text('[{"prompt": "x"},\n\n' + row + '\n,{"prompt": "y"}]')
    taskset = load(tmp_path / "a.json", on_bad_row="skip")
    assert [task.prompt for task in taskset.tasks] == ["x", "y"]
    [rejected] = taskset.rejected
    assert rejected.where == f"{tmp_path}/a.json:3: row 1"
    assert expected in rejected.reason


def test_parquet_columns_and_numbers_with_two_meanings(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def written(name: str, columns: dict[str, Any]) -> Path:
        parquet.write_table(arrow.table(columns), tmp_path / name)
        return tmp_path / name

    twice = arrow.Table.from_arrays([arrow.array(["a"]) for _ in range(3)], names=["prompt", "answer", "answer"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(TasksetError, match=r"twice.parquet: two columns have the same name, 'answer'; rename one"):
        load(tmp_path / "twice.parquet")
    inside = arrow.StructArray.from_arrays([arrow.array([1]), arrow.array([2])], names=["x", "x"])
    parquet.write_table(
        arrow.Table.from_arrays([arrow.array(["a"]), inside], names=["prompt", "m"]), tmp_path / "i.parquet"
    )
    with pytest.raises(TasksetError, match=r"i.parquet is not a readable Parquet file"):
        load(tmp_path / "i.parquet")
    for answers in ([1.0, NAN], [[1.0], [float("inf")]], [{"x": 1.0}, {"x": NAN}]):
        taskset = load(written("n.parquet", {"prompt": ["a", "b"], "answer": answers}), on_bad_row="skip")
        assert len(taskset.tasks) == 1
        assert "row 1: the answer (column answer) holds" in str(taskset.rejected[0])
    taskset = load(written("m.parquet", {"prompt": ["a"], "answer": ["1"], "level": [NAN]}))
    assert len(taskset.tasks) == 1, "a missing number of a column that plays no part is not an error"
    with pytest.raises(TasksetError, match="column level holds nan"):
        load(tmp_path / "m.parquet", template="{level}?")
    with pytest.raises(TasksetError, match=r"the answer .* is bytes, not text"):
        load(written("b.parquet", {"prompt": ["a"], "answer": [b"\xff"]}))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_files_in_another_encoding_are_named_as_such(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('[{"prompt": "x"}]\n'.encode("utf-16"))
    with pytest.raises(TasksetError, match=rf"{name} is not UTF-8 text.*; it looks like UTF-16; save it as UTF-8"):
        load(tmp_path / name)


def test_what_may_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for path in (tmp_path / "a.jsonl", Path("/dev/zero")):
        with pytest.raises(TasksetError, match="is a device or a pipe, which may have no end"):
            load(path)


def test_a_line_without_end_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.data.readers.MAX_JSONL_LINE_BYTES", 1 << 20)
    long = '{"prompt": "' + "x" * (5 << 20) + '"}'
    path = write_jsonl(tmp_path / "a.jsonl", [long, {"prompt": "y"}, long])
    taskset = load(path, on_bad_row="skip")
    assert [task.prompt for task in taskset.tasks] == ["y"]
    assert [row.where.rpartition(":")[2] for row in taskset.rejected] == ["1", "3"]


def test_splits_of_a_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict({"only": parts["test"]}).save_to_disk(str(tmp_path / "single"))
    parts["train"].save_to_disk(str(tmp_path / "plain"))
    taskset = load(tmp_path / "both", split="test")
    assert [task.id for task in taskset.tasks] == ["both/test:0", "both/test:1"]
    assert len(load(tmp_path / "single").tasks) == 2
    for folder, split, message in [
        ("both", None, "taskset.split is required: .* holds train, test"),
        ("both", "dev", "taskset.split dev does not exist: .* holds train, test"),
        ("plain", "train", "without splits; remove split"),
    ]:
        with pytest.raises(TasksetError, match=message):
            load(tmp_path / folder, split=split)
    for part in (tmp_path / "plain").glob("*.arrow"):
        part.write_bytes(b"nonsense")
    with pytest.raises(TasksetError, match="cannot be read by `datasets`"):
        load(tmp_path / "plain")


@pytest.mark.parametrize(("name", "module"), [("sums.parquet", "pyarrow"), ("sums", "datasets")])
def test_a_missing_extra_says_how_to_install_it(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = WRITERS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TasksetError, match=r"needs \w+: pip install 'rollmill\[data\]'"):
        load(path)
