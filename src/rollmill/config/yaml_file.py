"""YAML reader with a line number for every key, `${env:NAME}` in text, and YAML 1.2 scalars (so 1e-4 is a number)."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollmill.config.tree import (
    ConfigProblem,
    KeyPath,
    Node,
    Origin,
    format_key_path,
    raise_problems,
    to_plain_data,
    truncate_text,
)
from rollmill.errors import ConfigError
from rollmill.files import MAX_YAML_BYTES, describe_non_file, format_size, read_text

_ENV = re.compile(r"\$\{env:(?:(?P<name>[A-Za-z_]\w*)(?::(?P<default>[^}]*))?\}|(?P<malformed>))")
_TAG = "tag:yaml.org,2002:"
_DEEPEST = 50
"""Maximum nesting of sections and lists."""
_MOST_VALUES = 30_000
"""Maximum number of values per file; values repeated by anchors count each time."""
_LARGEST, _DIGITS = 2**63 - 1, 100
"""Largest integer (64 bits), and maximum digits of a number; longer texts are not converted."""


class _TooDeepError(yaml.MarkedYAMLError):
    """Raised when sections are nested too deep."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's core scalars: no sexagesimals, octals, dates or yes/no, and 1e-4 is a number."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Rejects nesting beyond the limit before Python's recursion limit is reached."""
        if self._depth > _DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _TooDeepError(problem=f"more than {_DEEPEST} levels inside each other", problem_mark=mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which our loader, unlike YAML 1.1, would read as a number."""


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass
class _Reader:
    """Converts yaml nodes to ours. `line_place` is False for command-line text, which has no lines."""

    place: str
    folder: Path
    problems: list[ConfigProblem]
    included: bool = False
    line_place: bool = True
    _open: set[int] = field(default_factory=set)
    _values: int = 0
    _characters: int = 0

    def origin(self, mark: Any) -> Origin:
        place = f"{self.place}:{mark.line + 1}" if self.line_place else self.place
        return Origin(place, self.folder, self.included)

    def node(self, raw: yaml.Node, origin: Origin, path: KeyPath) -> Node:
        if id(raw) in self._open:
            self.problem(origin, path, "the anchor contains itself; write the value out")
            return Node(None, origin, path)
        self._values += 1
        if self._values > _MOST_VALUES:
            text = f"more than {_MOST_VALUES} values, with what anchors (`&`, `*`) repeat; write less"
            raise ConfigError(str(ConfigProblem(origin.place, format_key_path(path), text)))
        self._open.add(id(raw))
        try:
            if isinstance(raw, yaml.MappingNode):
                return Node(self.mapping(raw, path), origin, path)
            if isinstance(raw, yaml.SequenceNode):
                entries = enumerate(raw.value)
                return Node(
                    [self.node(entry, self.origin(entry.start_mark), (*path, i)) for i, entry in entries], origin, path
                )
            return Node(self.scalar(raw.tag, raw.value, origin, path), origin, path)
        finally:
            self._open.discard(id(raw))

    def mapping(self, raw: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        lines: dict[str, int] = {}
        merges: list[yaml.Node] = []
        own: dict[str, Node] = {}
        for key, value in raw.value:
            origin = self.origin(key.start_mark)
            if key.tag == _TAG + "merge":
                merges += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif not isinstance(key, yaml.ScalarNode):
                self.problem(origin, path, "a key must be text")
            elif key.value in lines:
                text = f"is given twice (first on line {lines[key.value]}); keep one"
                self.problem(origin, (*path, key.value), text)
            else:
                lines[key.value] = key.start_mark.line + 1
                own[key.value] = self.node(value, origin, (*path, key.value))
        merged: dict[str, Node] = {}
        for source in reversed(merges):
            node = self.node(source, self.origin(source.start_mark), path)
            if isinstance(node.value, dict):
                merged |= node.value
            else:
                self.problem(node.origin, path, "`<<` must refer to a mapping")
        return merged | own

    def scalar(self, tag: str, text: str, origin: Origin, path: KeyPath) -> Any:
        match tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return self.integer(text, origin, path)
            case "float":
                number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
                if math.isinf(number) and "inf" not in text.lower():
                    self.problem(origin, path, f"the number {truncate_text(text)} is too large")
                    return 0.0
                return number
            case "str" | "merge":
                return self.interpolated(text, origin, path)
        self.problem(origin, path, f"the YAML tag {tag} is not supported; remove it")
        return None

    def integer(self, text: str, origin: Origin, path: KeyPath) -> int:
        number = int(text, 0) if len(text) <= _DIGITS else _LARGEST + 1
        if abs(number) > _LARGEST:
            self.problem(
                origin, path, f"the number {truncate_text(text)} is too large; whole numbers end at {_LARGEST}"
            )
            return 0
        return number

    def interpolated(self, text: str, origin: Origin, path: KeyPath) -> str:
        def value(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            if name is None:
                self.problem(origin, path, "malformed `${env:`; write ${env:NAME} or ${env:NAME:default}")
                return ""
            if name not in os.environ and default is None:
                advice = f"export {name}=... or write ${{env:{name}:default}}"
                self.problem(origin, path, f"environment variable {name} is not set; {advice}")
            found = os.environ.get(name, default or "")
            self._characters += len(found)
            return found if self._characters <= MAX_YAML_BYTES else ""

        found = _ENV.sub(value, text)
        if self._characters > MAX_YAML_BYTES:
            text = f"the file's environment variables have more than {format_size(MAX_YAML_BYTES)} together; write less"
            self.problem(origin, path, text)
            self._characters = 0
        try:
            found.encode()
        except UnicodeEncodeError:
            self.problem(origin, path, "the text is not valid Unicode (half of a surrogate pair); correct it")
            return ""
        return found

    def problem(self, origin: Origin, path: KeyPath, text: str) -> None:
        self.problems.append(ConfigProblem(origin.place, format_key_path(path), text))


def read_yaml(path: Path, problems: list[ConfigProblem], *, included: bool = False) -> Node:
    """Reads one YAML file as a tree. Duplicate keys and missing variables are appended to `problems`.

    Raises ConfigError if the file cannot be read, is not YAML or does not hold a mapping.
    """
    if describe_non_file(path) == "no such file":
        raise ConfigError(f"{path}: no such file; `rollmill init {path}` writes a first one")
    text = read_text(path, MAX_YAML_BYTES)
    raw = _compose(text, str(path))
    if not isinstance(raw, yaml.MappingNode):
        found = "is empty" if raw is None else "does not hold `key: value` lines"
        raise ConfigError(f"{path}: {found}; `rollmill init FILE` writes a first run file")
    reader = _Reader(str(path), path.parent, problems, included)
    return reader.node(raw, Origin(str(path), path.parent, included), ())


def read_plain_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file written by rollmill as ordinary dicts, lists and scalars. Raises ConfigError."""
    problems: list[ConfigProblem] = []
    found = to_plain_data(read_yaml(path, problems))
    raise_problems(problems)
    assert isinstance(found, dict)
    return found


def write_yaml(data: dict[str, Any]) -> str:
    """Returns YAML that `read_yaml`, and any YAML 1.1 reader, reads as the same data."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def parse_override_value(text: str, option: str, folder: Path, path: KeyPath, problems: list[ConfigProblem]) -> Node:
    """Parses the value of a command-line override.

    Text that starts with a bracket, a brace or a quote is YAML; anything else is one plain scalar, so that `#` and `: `
    need no quoting.
    """
    reader = _Reader(option, folder, problems, line_place=False)
    origin, text = Origin(option, folder), text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        raw = _compose(text, option, lines=False)
        assert raw is not None
        return reader.node(raw, origin, path)
    tag: str = _Loader("").resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return Node(reader.scalar(tag, text, origin, path), origin, path)


def _compose(text: str, place: str, lines: bool = True) -> yaml.Node | None:
    try:
        return _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{place}:{mark.line + 1}" if lines and mark else truncate_text(place, 300)
        column = f" at column {mark.column + 1}" if mark else ""
        what = error.problem or error.context or "syntax error"
        advice = "quote text that holds `: `, ` #`, brackets or braces"
        if "'\\t'" in what:
            advice = "indent with spaces"
        elif isinstance(error, _TooDeepError):
            advice = "write it flatter"
        raise ConfigError(f"{where}: not valid YAML{column}: {what}; {advice}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{place}: not valid YAML: {error.reason} at character {error.position}") from None
