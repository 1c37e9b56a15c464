"""Raw configuration tree in which every value carries the file and line it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError

Key = str | int
KeyPath = tuple[Key, ...]

_SHORT: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "algorithm": ("name", str),
    "advantage": ("name", str),
    "loss": ("name", str),
    "sampler": ("name", str),
    "kl": ("coefficient", (int, float)),
}
"""Sections that may be written as one value, and the key of that value."""
_LONG = 300
"""Maximum characters of a place or key in a message."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a value: `FILE:LINE`, or the command-line option."""

    place: str
    folder: Path  #: base of relative paths that do not exist in the current folder
    included: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A scalar, a mapping of nodes or a list of nodes. `path` is the key path at which it was written."""

    value: Any
    origin: Origin
    path: KeyPath


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A configuration error, printed as `PLACE: KEY: TEXT`."""

    place: str
    key: str
    text: str

    def __str__(self) -> str:
        parts = (truncate_text(self.place, _LONG), truncate_text(self.key, _LONG), self.text)
        return ": ".join(part for part in parts if part)


def raise_problems(problems: Sequence[ConfigProblem]) -> None:
    """Raises one ConfigError that lists every distinct problem, if there are any."""
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(str(problem) for problem in problems)))


def truncate_text(text: str, longest: int = 100) -> str:
    """Shortens a long text for a message and appends its length."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def format_key_path(path: KeyPath) -> str:
    """Formats `("rewards", 0, "weight")` as `rewards.0.weight`."""
    return ".".join(str(key) for key in path)


def to_plain_data(node: Node) -> Any:
    """Converts the tree to ordinary dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: to_plain_data(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain_data(child) for child in node.value]
    return node.value


def child_node(node: Node, key: Key) -> Node | None:
    """Returns the node under `key`, or None."""
    if isinstance(node.value, dict):
        return node.value.get(key)
    if isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
        return node.value[key]  # type: ignore[no-any-return]
    return None


def find(node: Node, path: KeyPath) -> Node | None:
    """Returns the node at `path`, or None; an explicit null counts as absent."""
    current: Node | None = node
    for key in path:
        current = child_node(current, key) if current is not None else None
    return None if current is None or current.value is None else current


def locate_key(node: Node, path: KeyPath) -> tuple[str, str]:
    """Returns place and written key of `path`, or of the deepest existing node on the way there."""
    for depth, key in enumerate(path):
        below = child_node(node, key)
        if below is None:
            return node.origin.place, format_key_path(node.path + path[depth:])
        node = below
    return node.origin.place, format_key_path(node.path)


def iter_leaves(node: Node) -> Iterator[Node]:
    """Yields every node without children."""
    children = node.value.values() if isinstance(node.value, dict) else node.value
    if isinstance(node.value, dict | list) and node.value:
        for below in children:
            yield from iter_leaves(below)
    else:
        yield node


def edit(node: Node, pattern: Sequence[str], change: Callable[[Node], Node]) -> Node:
    """Returns the tree with `change` applied to every node that matches `pattern`; `*` matches every entry of a list or
    mapping."""
    if not pattern:
        return change(node)
    head, rest = pattern[0], pattern[1:]
    if head == "*" and isinstance(node.value, list):
        return Node([edit(entry, rest, change) for entry in node.value], node.origin, node.path)
    if head == "*" and isinstance(node.value, dict):
        return Node({key: edit(entry, rest, change) for key, entry in node.value.items()}, node.origin, node.path)
    if isinstance(node.value, dict) and head in node.value:
        return Node({**node.value, head: edit(node.value[head], rest, change)}, node.origin, node.path)
    return node


def merge_trees(base: Node, top: Node, key: str = "") -> Node:
    """Merges `top` over `base`: mappings merge, everything else replaces.

    A mapping that names another component replaces the old one as a whole, because their keys differ: an `algorithm` or
    `generator` with another `name`, a `taskset` with another path, generator, function or mix. A name or number that
    stands for a section (`loss: gspo`, `kl: 0.1`) merges as that section.
    """
    if isinstance(base.value, dict) or isinstance(top.value, dict):
        base, top = expand_shorthand(key, base), expand_shorthand(key, top)
    if not isinstance(base.value, dict) or not isinstance(top.value, dict) or _another(key, base, top):
        return top
    merged = dict(base.value)
    for name, node in top.value.items():
        merged[name] = merge_trees(merged[name], node, name) if name in merged else node
    return Node(merged, top.origin, top.path)


def expand_shorthand(key: Key, node: Node) -> Node:
    """Expands a name or number that stands for a section, whose only leaf is the same node; returns every other node
    unchanged."""
    short = _SHORT.get(str(key))
    if short is None or not isinstance(node.value, short[1]) or isinstance(node.value, bool):
        return node
    return Node({short[0]: node}, node.origin, node.path)


def _another(key: str, base: Node, top: Node) -> bool:
    identities: dict[str, list[KeyPath]] = {
        "algorithm": [("name",)],
        "advantage": [("name",)],
        "loss": [("name",)],
        "generator": [("name",)],
        "sampler": [("name",)],
        "taskset": [("path",), ("generator", "name"), ("function",), ("mix",)],
    }
    for identity in identities.get(key, []):
        new, old = find(top, identity), find(base, identity)
        if new is not None and (old is None or new.value != old.value):
            return True
    return False
