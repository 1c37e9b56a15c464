"""Exports and imports groups as Parquet files, exactly: one row per experience, whole groups in each row group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollmill.buffer.base import FEEDBACK, IMPORTED, Group, made_by_run
from rollmill.buffer.row_codec import (
    decode_experience_body,
    decode_group,
    encode_experience_body,
    encode_group,
    escape_for_database,
)
from rollmill.errors import ConfigError, StoreError
from rollmill.files import explain_write_errors, temporary_path
from rollmill.types import IMPORTED_FROM, Experience

FORMAT = b"1"
_FORMAT_KEY, _RUN_KEY, _TOKENIZER_KEY = b"rollmill.format", b"rollmill.run_id", b"rollmill.tokenizer"
_ROW_GROUP_BYTES = 16 << 20
_ARRAYS = {
    "token_ids": "int32",
    "versions": "int32",
    "action_mask": "bool_",
    "logprobs": "float32",
    "advantage": "float32",
}


def write_parquet(groups: Iterable[Group], path: Path, *, run_id: str, tokenizer: str = "") -> int:
    """Write groups to `path` atomically; returns their number. Holds about 16 MiB of rows in memory.

    Args:
        tokenizer: fingerprint of the tokenizer; empty if unknown.

    Raises:
        ConfigError: pyarrow is not installed.
        RollmillError: the file cannot be written.
    """
    import_pyarrow()
    import pyarrow.parquet as pq

    schema = _schema(run_id, tokenizer)
    temporary = temporary_path(path)
    count = 0
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # a dictionary of floats would merge different NaNs
            coded = [f"{name}.list.element" for name, kind in _ARRAYS.items() if kind != "float32"]
            coded += [name for name in schema.names if name not in _ARRAYS]
            with pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=coded) as file:
                for page in _pages(groups):
                    file.write_table(_table(page, schema), row_group_size=1 << 30)
                    count += len(page)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return count


def read_parquet(path: Path) -> Iterator[Group]:
    """Read the groups of a file, one row group at a time.

    Raises:
        ConfigError: pyarrow is not installed.
        StoreError: the file is missing, damaged or no export.
    """
    import_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = (file.schema_arrow.metadata or {}).get(_FORMAT_KEY)
            if found != FORMAT:
                what = "was not made by `rollmill buffer export`" if found is None else f"has format {found.decode()}"
                raise StoreError(f"{path} {what}; this rollmill reads format {FORMAT.decode()}")
            for index in range(file.num_row_groups):
                yield from _groups(file.read_row_group(index))
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise StoreError(f"{path} cannot be read as an export of a buffer: {error}") from error


def import_groups(path: Path, run_id: str, tokenizer: str = "") -> Iterator[Group]:
    """Read the groups of a file for the run `run_id`, which keeps them when it resumes from a checkpoint.

    Groups of another run, and the completions that its feedback refers to, get new ids, which cannot clash with the
    run's.

    Raises like `read_parquet`, and StoreError if the file has another tokenizer than `tokenizer`.
    """
    source, source_tokenizer = _source(path)
    if tokenizer and source_tokenizer and tokenizer != source_tokenizer:
        raise StoreError(
            f"{path} was exported from a run with another tokenizer ({source_tokenizer}) than this run's "
            f"({tokenizer}), so its tokens mean other text"
        )
    for group in read_parquet(path):
        if source == run_id:
            yield replace(group, writer=IMPORTED if made_by_run(group.writer) else group.writer)
        else:
            yield imported_group(group, f"{source[:8]}-")


def imported_group(group: Group, prefix: str) -> Group:
    """Convert a group of another run, which a run keeps when it resumes: its names begin with `prefix`."""
    renamed = [_renamed(experience, prefix) for experience in group.experiences]
    info = _of_another_run(group.info, prefix) if group.writer == FEEDBACK else group.info
    writer = IMPORTED if made_by_run(group.writer) else group.writer
    return replace(group, id=prefix + group.id, experiences=renamed, writer=writer, info=info)


def import_pyarrow() -> None:
    """Raises ConfigError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("Parquet files need pyarrow: pip install 'rollmill[data]'") from error


def _renamed(experience: Experience, prefix: str) -> Experience:
    info = {IMPORTED_FROM: prefix.removesuffix("-"), **experience.info}
    return replace(experience, id=prefix + experience.id, group=prefix + experience.group, info=info)


def _of_another_run(info: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Convert `info` of another run's feedback: prefix the names, and drop the step, which belongs to that run."""
    names = {key: prefix + info[key] for key in ("group", "slot") if info.get(key)}
    lists = {key: [prefix + name for name in info[key]] for key in ("of", "replaces") if key in info}
    return {key: value for key, value in info.items() if key != "step"} | names | lists


def _source(path: Path) -> tuple[str, str]:
    """Read the id of the exporting run, and its tokenizer's fingerprint."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        about = pq.read_schema(path).metadata or {}
        return about.get(_RUN_KEY, b"other").decode(), about.get(_TOKENIZER_KEY, b"").decode()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} cannot be read as an export of a buffer: {error}") from error


def _schema(run_id: str, tokenizer: str) -> Any:
    import pyarrow as pa

    texts = ("group", "shelf", "writer", "group_body", "experience", "task", "prompt", "response", "body")
    fields = [pa.field(name, pa.string()) for name in texts]
    fields += [pa.field("priority", pa.float64()), pa.field("created_at", pa.float64())]
    fields += [pa.field("position", pa.int32()), pa.field("reward", pa.float64())]
    fields += [pa.field(name, pa.list_(pa.field("element", getattr(pa, kind)()))) for name, kind in _ARRAYS.items()]
    about = {_FORMAT_KEY: FORMAT, _RUN_KEY: run_id.encode(), _TOKENIZER_KEY: tokenizer.encode()}
    return pa.schema(fields, metadata=about)


def _pages(groups: Iterable[Group]) -> Iterator[list[Group]]:
    page: list[Group] = []
    size = 0
    for group in groups:
        page.append(group)
        size += sum(16 * len(each.token_ids) + 2 * len(each.response) + 1000 for each in group.experiences)
        size += sum(2 * each.routing.nbytes for each in group.experiences if each.routing is not None)
        if size > _ROW_GROUP_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def _table(groups: Sequence[Group], schema: Any) -> Any:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for group in groups:
        encoded = encode_group(group, {})
        inside: list[Experience | None] = [*group.experiences] or [None]  # an empty group has one row
        for position, each in enumerate(inside):
            columns["group"].append(encoded["id"])
            columns["group_body"].append(encoded["body"])
            for name in ("shelf", "writer", "priority", "created_at"):
                columns[name].append(encoded[name])
            columns["position"].append(None if each is None else position)
            columns["body"].append(None if each is None else encode_experience_body(each))
            for name, attribute in (("experience", "id"), ("task", "task_id"), ("prompt",) * 2, ("response",) * 2):
                columns[name].append(None if each is None else escape_for_database(getattr(each, attribute)))
            columns["reward"].append(None if each is None else each.reward)
            for name in _ARRAYS:
                columns[name].append(None if each is None else getattr(each, name))
    arrays = [
        _lists(columns[field.name], field.type)
        if pa.types.is_list(field.type)
        else pa.array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _lists(values: Sequence[Any], kind: Any) -> Any:
    """Build a column of arrays from numpy, without converting numbers to Python objects."""
    import pyarrow as pa

    offsets = np.cumsum([0, *(0 if each is None else len(each) for each in values)], dtype=np.int32)
    present = [each for each in values if each is not None]
    dtype = kind.value_type.to_pandas_dtype()
    flat = np.concatenate([*present, np.zeros(0, dtype)]).astype(dtype)
    empty = np.array([each is None for each in values])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind.value_type), type=kind, mask=pa.array(empty))


def _groups(table: Any) -> Iterator[Group]:
    arrays = {name: _arrays(table[name].combine_chunks()) for name in _ARRAYS}
    rows = table.select(["group", "shelf", "writer", "group_body", "priority", "created_at", "position", "body"])
    group: Group | None = None
    for index, row in enumerate(rows.to_pylist()):
        if group is None or group.id != row["group"]:
            if group is not None:
                yield group
            columns = {name: row[name] for name in ("shelf", "writer", "priority", "created_at")}
            group = decode_group(SimpleNamespace(id=row["group"], body=row["group_body"], **columns), [])
        if row["position"] is not None:
            group.experiences.append(
                decode_experience_body(row["body"], **{name: found[index] for name, found in arrays.items()})
            )
    if group is not None:
        yield group


def _arrays(column: Any) -> list[Any]:
    flat, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [flat[offsets[i] : offsets[i + 1]].copy() if valid[i] else None for i in range(len(column))]
