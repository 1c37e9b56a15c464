"""Rows of files: .jsonl, .json, .parquet, .csv and folders written by `datasets`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rollmill.core.errors import TasksetError
from rollmill.tasks.record import Record, Records, record_of

_INSTALL = "pip install 'rollmill[data]'"


def read_path(path: Path, split: str | None) -> Records:
    """Records of a file or a `datasets` folder, read as they are asked for.

    Raises:
        TasksetError: the path does not exist, is of another kind or cannot be read.
    """
    if path.is_dir():
        return read_folder(path, split)
    if not path.is_file():
        raise TasksetError(f"taskset.path: {path} does not exist{_nearest(path)}")
    if split is not None:
        raise TasksetError(f"taskset.split: only a folder written by `datasets` has splits, and {path} is a file")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(_READERS)
        raise TasksetError(f"taskset.path: {path} is none of {known} nor a folder written by `datasets`; convert it")
    return _readable(path, reader(path))


def _readable(path: Path, records: Records) -> Records:
    try:
        yield from records
    except OSError as error:
        raise TasksetError(f"taskset.path: {path} cannot be read: {error.strerror or error}") from error


def _nearest(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f", nor does its folder {folder}; correct the path"
    stems = {entry.stem: entry for entry in sorted(folder.iterdir())}
    near = get_close_matches(path.stem, list(stems), n=1)
    if near:
        return f"; did you mean {stems[near[0]]}?"
    files = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in _READERS)
    return f"; {folder} holds {', '.join(files[:5]) or 'no taskset'}"


def read_jsonl(path: Path) -> Records:
    """One JSON object per line, UTF-8; blank lines are no rows."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _json_line(f"{path}:{number}", line)


def _json_line(where: str, line: bytes) -> Record:
    try:
        return record_of(where, json.loads(line.rstrip().decode("utf-8")))
    except UnicodeDecodeError as error:
        return Record(where, problem=f"not UTF-8 text (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return Record(where, problem=f"not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        return Record(where, problem=f"not readable JSON: {error}")


def read_json(path: Path) -> Records:
    """One list of objects."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TasksetError(f"taskset.path: {path} is not UTF-8 text (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        advice = "; a file with one object per line is named .jsonl" if error.msg == "Extra data" else ""
        raise TasksetError(f"taskset.path: {path}:{error.lineno}: not valid JSON: {error.msg}{advice}") from error
    except (ValueError, RecursionError) as error:
        raise TasksetError(f"taskset.path: {path}: not readable JSON: {error}") from error
    if not isinstance(value, list):
        raise TasksetError(f"taskset.path: {path} holds {type(value).__name__}, not a list of objects")
    for number, entry in enumerate(value):
        yield record_of(f"{path}: row {number}", entry)


def read_csv(path: Path) -> Records:
    """Comma-separated values, UTF-8, the first line with the columns' names; every value is text."""
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            columns = next(lines, [])
        except csv.Error as error:
            raise TasksetError(f"taskset.path: {path}:1: not valid CSV: {error}") from error
        if len(set(columns)) < len(columns):
            raise TasksetError(f"taskset.path: {path}:1: two columns have the same name ({', '.join(columns)})")
        yield from _csv_rows(path, columns, lines)


def _csv_rows(path: Path, columns: list[str], lines: Any) -> Records:
    while True:
        where = f"{path}:{lines.line_num + 1}"
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield Record(where, problem=f"not valid CSV: {error}")
            continue
        if not values:
            continue
        if len(values) != len(columns):
            yield Record(where, problem=f"{len(values)} values for {len(columns)} columns")
        elif any("\udc80" <= character <= "\udcff" for value in values for character in value):
            yield Record(where, problem="not UTF-8 text")
        else:
            yield Record(where, dict(zip(columns, values, strict=True)))


def read_parquet(path: Path) -> Records:
    """Rows of a Parquet file (extra `data`)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise TasksetError(f"taskset.path: reading {path} needs pyarrow: {_INSTALL}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield record_of(f"{path}: row {number}", row)
    except pyarrow.ArrowException as error:
        raise TasksetError(f"taskset.path: {path} is not a readable Parquet file: {error}") from error


def read_folder(path: Path, split: str | None) -> Records:
    """Rows of a folder written by `datasets.save_to_disk` (extra `data`)."""
    marks = ("dataset_info.json", "dataset_dict.json", "state.json")
    if not any((path / mark).is_file() for mark in marks):
        files = sorted(file.name for file in path.iterdir() if file.suffix.lower() in _READERS)
        advice = f"; did you mean {path / files[0]}?" if files else "; give a file or such a folder"
        raise TasksetError(f"taskset.path: {path} is a folder, but not one written by `datasets.save_to_disk`{advice}")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise TasksetError(f"taskset.path: reading the folder {path} needs datasets: {_INSTALL}") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets and pyarrow raise many kinds for a damaged folder
        raise TasksetError(f"taskset.path: {path} cannot be read by `datasets`: {error}") from error
    return _rows_of(_one_split(path, loaded, split), path)


def _one_split(path: Path, loaded: Any, split: str | None) -> Any:
    splits = list(loaded) if isinstance(loaded, dict) else []
    if not splits:
        if split is not None:
            raise TasksetError(f"taskset.split: {path} holds a single dataset without splits; remove split")
        return loaded
    if split is None and len(splits) == 1:
        return loaded[splits[0]]
    if split not in splits:
        found = "is required" if split is None else f"{split} does not exist"
        raise TasksetError(f"taskset.split {found}: {path} holds {', '.join(splits)}")
    return loaded[split]


def _rows_of(rows: Any, path: Path) -> Iterator[Record]:
    try:
        for number, row in enumerate(rows):
            yield record_of(f"{path}: row {number}", row)
    except Exception as error:
        raise TasksetError(f"taskset.path: {path} cannot be read by `datasets`: {error}") from error


_READERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_csv,
}
