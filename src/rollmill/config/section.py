"""The strict base of every section: an unknown key is an error, never ignored; and names that stand in paths."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

_LONGEST_NAME = 100
"""UTF-8 bytes. Files have names of at most 255, and names of folders and files are made of it."""


class Section(BaseModel):
    """Base of configuration sections."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _folder_name(value: str) -> str:
    """A name that is one part of a path: spaces and all scripts may be in it."""
    shown = f"found {value!r:.60}"
    if not value.strip() or value in (".", ".."):
        raise ValueError(f"expected a name, {shown}; it names a folder, too")
    if "/" in value or "\\" in value:
        raise ValueError(f"expected a name without `/` and `\\`, {shown}; `--out` says in which folder a run is")
    if not value.isprintable() or value != value.strip():
        raise ValueError(f"expected a name without control characters, and without space around it, {shown}")
    return _short(value)


def _plain_name(value: str) -> str:
    """A name of letters, digits, `.`, `_` and `-`."""
    if re.fullmatch(r"[\w.-]+", value) is None or value in (".", ".."):
        raise ValueError(f"expected letters, digits, `.`, `_` and `-`, found `{value!s:.60}`")
    return _short(value)


def _endpoint(value: str) -> str:
    if not value.isprintable() or re.search(r"\s", value):
        raise ValueError(f"expected a URL without spaces and control characters, found {value!r:.80}")
    return value


def _short(value: str) -> str:
    if (length := len(value.encode())) > _LONGEST_NAME:
        raise ValueError(f"expected a name of at most {_LONGEST_NAME} bytes, found {length}: `{value:.30}...`")
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]
"""The base URL of a server."""
FolderName = Annotated[str, AfterValidator(_folder_name)]
"""The name of a run or a stage: one part of a path."""
PlainName = Annotated[str, AfterValidator(_plain_name)]
"""A name that is part of metrics' names and ids, too."""
