"""Source rows, and readers of .jsonl, .json, .parquet, .csv and folders written by `datasets`."""

from __future__ import annotations

import csv
import json
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from rollmill.config.hub import reference_of
from rollmill.data.padding import without_padding
from rollmill.errors import TasksetError
from rollmill.files import (
    MAX_JSONL_LINE_BYTES,
    describe_json_error,
    describe_non_file,
    encoding_advice,
    format_size,
    parse_strict_json,
)

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source; `problem` is the reason if it could not be read (`row` is then empty)."""

    where: str  #: file:line, or the source and the row's number
    row: Row = field(default_factory=dict)
    problem: str | None = None
    metadata: dict[str, Any] | None = None  #: the task's metadata; default: the columns without another role


class BadRowError(ValueError):
    """A row cannot become a task; the message is the reason."""


def make_record(where: str, value: Any) -> SourceRow:
    """Make the row of a value, which has to be a mapping with text keys."""
    if not isinstance(value, Mapping):
        return SourceRow(where, problem=f"expected an object, found {type(value).__name__}")
    strange = [key for key in value if not isinstance(key, str)]
    if strange:
        return SourceRow(where, problem=f"column names must be text, found {strange[0]!r}")
    return SourceRow(where, dict(value))


def to_finite_number(value: Any) -> float | None:
    """Convert a value to a finite number, also from text (as in CSV); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def check_finite(value: Any, what: str) -> None:
    """Raises BadRowError if a value is or contains NaN or an infinity, which no answer equals."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, numbers.Real) and not isinstance(part, numbers.Rational) and not math.isfinite(part):
            raise BadRowError(f"{what} holds {part}, which nothing equals; leave it out, or write text")


SourceRows: TypeAlias = Iterator[SourceRow]


_INSTALL = "pip install 'rollmill[data]'"


def read_path(path: Path, split: str | None, subset: str | None = None) -> SourceRows:
    """Rows of a file or a `datasets` folder, read lazily.

    Raises:
        TasksetError: the path does not exist, has an unsupported type or cannot be read.
    """
    if reference_of(path) is not None:
        return read_hub_folder(path, split, subset)
    if subset is not None:
        raise TasksetError(f"taskset.subset: only a data set of the hub has subsets, and {path} is none; remove it")
    if path.is_dir():
        return read_folder(path, split)
    if what := describe_non_file(path):
        missing = f"does not exist{_nearest(path)}" if what == "no such file" else what
        raise TasksetError(f"taskset.path: {path} {missing}")
    if split is not None:
        raise TasksetError(f"taskset.split: only a folder written by `datasets` has splits, and {path} is a file")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(_READERS)
        raise TasksetError(f"taskset.path: {path} is none of {known} nor a folder written by `datasets`; convert it")
    return _readable(path, reader(path))


def _readable(path: Path, records: SourceRows) -> SourceRows:
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


def read_jsonl(path: Path) -> SourceRows:
    """One JSON object per line, UTF-8; blank lines are skipped."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_JSONL_LINE_BYTES + 1):
            number += 1
            if number == 1:
                _require_utf8(path, line)
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > MAX_JSONL_LINE_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MAX_JSONL_LINE_BYTES)):
                    pass
                yield SourceRow(
                    f"{path}:{number}", problem=f"the line is longer than {format_size(MAX_JSONL_LINE_BYTES)}"
                )
            elif line.strip():
                yield _json_line(f"{path}:{number}", line)


def _require_utf8(path: Path, start: bytes) -> None:
    """Raises TasksetError for a file in another encoding."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start[:1000]:
        raise TasksetError(f"taskset.path: {path} is not UTF-8 text; {encoding_advice(start)}")


def _json_line(where: str, line: bytes) -> SourceRow:
    try:
        return make_record(where, parse_strict_json(line.rstrip().decode("utf-8"), unique_keys=True))
    except UnicodeDecodeError as error:
        return SourceRow(where, problem=f"not UTF-8 text (byte {error.start + 1} of the line)")
    except ValueError as error:
        return SourceRow(where, problem=describe_json_error(error))


def read_json(path: Path) -> SourceRows:
    """One list of objects."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        place = f"taskset.path: {path} is not UTF-8 text (byte {error.start + 1})"
        raise TasksetError(f"{place}; {encoding_advice(content)}") from error
    except json.JSONDecodeError as error:
        advice = "; a file with one object per line is named .jsonl" if error.msg == "Extra data" else ""
        raise TasksetError(f"taskset.path: {path}:{error.lineno}: not valid JSON: {error.msg}{advice}") from error
    except (ValueError, RecursionError) as error:
        problem = describe_json_error(error) if isinstance(error, ValueError) else "brackets too deep inside each other"
        raise TasksetError(f"taskset.path: {path}: {problem}") from error
    if not isinstance(value, list):
        raise TasksetError(f"taskset.path: {path} holds {type(value).__name__}, not a list of objects")
    yield from _json_rows(path, text, len(value))


def _json_rows(path: Path, text: str, count: int) -> SourceRows:
    """Parse each entry of a valid list again by itself, so that a bad one is reported with its line."""
    decoder, at, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    for number in range(count):
        while text[at] in " \t\r\n,":
            at += 1
        _, end = decoder.raw_decode(text, at)
        line, counted = line + text.count("\n", counted, at), at
        try:
            yield make_record(f"{path}: row {number}", parse_strict_json(text[at:end], unique_keys=True))
        except ValueError as error:
            yield SourceRow(f"{path}:{line}: row {number}", problem=describe_json_error(error))
        at = end


def read_csv(path: Path) -> SourceRows:
    """Comma-separated values, UTF-8, with the column names in the first line; every value is text."""
    csv.field_size_limit(1 << 30)
    with path.open("rb") as start:
        _require_utf8(path, start.readline(1000))
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            columns = next(lines, [])
        except csv.Error as error:
            raise TasksetError(f"taskset.path: {path}:1: not valid CSV: {error}") from error
        _require_different(f"{path}:1", columns)
        yield from _csv_rows(path, columns, lines)


def _require_different(where: str, columns: list[str]) -> None:
    """Raises TasksetError if two columns have the same name."""
    twice = [column for number, column in enumerate(columns) if column in columns[:number]]
    if twice:
        raise TasksetError(f"taskset.path: {where}: two columns have the same name, {twice[0]!r:.80}; rename one")


def _csv_rows(path: Path, columns: list[str], lines: Any) -> SourceRows:
    while True:
        where = f"{path}:{lines.line_num + 1}"
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield SourceRow(where, problem=f"not valid CSV: {error}")
            continue
        if not values:
            continue
        if len(values) != len(columns):
            yield SourceRow(where, problem=f"{len(values)} values for {len(columns)} columns")
        elif any("\udc80" <= character <= "\udcff" for value in values for character in value):
            yield SourceRow(where, problem="not UTF-8 text")
        else:
            yield SourceRow(where, dict(zip(columns, values, strict=True)))


def read_parquet(path: Path) -> SourceRows:
    """Rows of a Parquet file (extra `data`)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise TasksetError(f"taskset.path: reading {path} needs pyarrow: {_INSTALL}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_different(str(path), file.schema_arrow.names)
            rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield make_record(f"{path}: row {number}", without_padding(row))
    except (pyarrow.ArrowException, ValueError) as error:  # ValueError: duplicate field names inside a column
        if isinstance(error, TasksetError):
            raise
        raise TasksetError(f"taskset.path: {path} is not a readable Parquet file: {error}") from error


def read_folder(path: Path, split: str | None) -> SourceRows:
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
    return _rows_of(_undecoded(_one_split(path, loaded, split)), path)


def _undecoded(rows: Any) -> Any:
    """The same rows, with images as bytes or paths rather than decoded."""
    import datasets

    def plain(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(feature, dict):
            return {name: plain(each) for name, each in feature.items()}
        if isinstance(feature, list):
            return [plain(each) for each in feature]
        inner = getattr(feature, "feature", None)
        return feature if inner is None else type(feature)(plain(inner))

    found = datasets.Features({name: plain(feature) for name, feature in rows.features.items()})
    return rows if found == rows.features else rows.cast(found)


def read_hub_folder(path: Path, split: str | None, subset: str | None) -> SourceRows:
    """Rows of a data set in the hub's cache, as `datasets.load_dataset` reads it (extra `data`)."""
    name = reference_of(path)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise TasksetError(f"taskset.path: reading {name} needs datasets: {_INSTALL}") from error
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(str(path), name=subset)
    except Exception as error:  # datasets and pyarrow raise many kinds
        reason = str(error).partition("\n")[0]
        raise TasksetError(f"taskset.path: {name} cannot be read by `datasets`: {reason:.400}") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()
    return _rows_of(_one_split(path, loaded, split), path)


def _holds_json(feature: Any) -> bool:
    """True if a feature of `datasets` is JSON text that it parses, or has such a one inside: that is not padded."""
    parts = list(feature.values()) if isinstance(feature, dict) else feature if isinstance(feature, list) else []
    inner = getattr(feature, "feature", None)
    parts += [] if inner is None else [inner]
    return type(feature).__name__ == "Json" or any(_holds_json(each) for each in parts)


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


def _rows_of(rows: Any, path: Path) -> Iterator[SourceRow]:
    try:
        exact = {name for name, feature in rows.features.items() if _holds_json(feature)}
        for number, row in enumerate(rows):
            whole = {name: row[name] for name in exact}
            yield make_record(f"{path}: row {number}", without_padding(row) | whole)
    except Exception as error:
        raise TasksetError(f"taskset.path: {path} cannot be read by `datasets`: {error}") from error


_READERS: dict[str, Callable[[Path], SourceRows]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_csv,
}
