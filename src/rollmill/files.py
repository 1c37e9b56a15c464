"""Writing files so that a reader, or a resumed run, never sees half of one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.errors import RollmillError


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into a RollmillError that says what to do."""
    try:
        yield
    except OSError as error:
        raise RollmillError(
            f"cannot write {path}: {error.strerror or error}. Free some space, or choose another folder with --out."
        ) from error


def atomic_write(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step; the folder is made if missing. Raises RollmillError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def to_jsonable(value: Any, *, non_finite: str | None = None) -> Any:
    """`value` as JSON can hold it: numpy becomes Python, tuples and sets become lists, keys become text.

    NaN and infinities become None, or their name (`nan`, `inf`, `-inf`) with `non_finite="name"`. What JSON has no
    notion of becomes its `repr`.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return repr(value) if non_finite else None
    if isinstance(value, dict):
        return {str(key): to_jsonable(item, non_finite=non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item, non_finite=non_finite) for item in value]
    return repr(value)
