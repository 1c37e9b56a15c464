"""`--set section.key=value`: change one value of the run file from the command line."""

from __future__ import annotations

from pathlib import Path

from rollmill.config.tree import ConfigProblem, Key, Node, Origin, expand_shorthand, format_key_path, truncate_text
from rollmill.config.yaml_file import parse_override_value

_DEEPEST = 50
"""Most keys of one override; files are no deeper."""


def apply_override(root: Node, assignment: str, folder: Path, problems: list[ConfigProblem]) -> Node:
    """The tree with one `section.key=value` applied; list entries are reached by index (`rewards.0.weight=2`)."""
    option = f"--set {assignment}"
    target, equals, text = assignment.partition("=")
    keys = target.strip().split(".")
    if not equals or not all(keys):
        problems.append(ConfigProblem(option, "", "expected section.key=value, for example trainer.lr=1e-4"))
        return root
    if len(keys) > _DEEPEST:
        problems.append(ConfigProblem(option, "", f"{len(keys)} keys inside each other; no section is that deep"))
        return root
    return _assign(root, keys, (), text, Origin(option, folder), problems)


def _assign(
    node: Node, keys: list[str], done: tuple[Key, ...], text: str, origin: Origin, problems: list[ConfigProblem]
) -> Node:
    if not keys:
        return parse_override_value(text, origin.place, origin.folder, done, problems)
    head, rest = keys[0], keys[1:]
    node = expand_shorthand(done[-1], node) if done else node
    if isinstance(node.value, list):
        if not head.isdecimal() or len(head) > 9 or int(head) >= len(node.value):
            problems.append(
                ConfigProblem(
                    origin.place, format_key_path((*done, head)), _no_entry(format_key_path(done), node.value)
                )
            )
            return node
        index = int(head)
        entries = list(node.value)
        entries[index] = _assign(entries[index], rest, (*done, index), text, origin, problems)
        return Node(entries, node.origin, node.path)
    if node.value is None and head.isdecimal():
        advice = "is not a list in the run file, so it has no entries; add them there"
        problems.append(ConfigProblem(origin.place, format_key_path(done), advice))
        return node
    if node.value is not None and not isinstance(node.value, dict):
        found = f"is `{truncate_text(str(node.value))}` in the run file ({node.origin.place})"
        advice = f"{found}, not a section; set it without `.{head}`"
        problems.append(ConfigProblem(origin.place, format_key_path(done), advice))
        return node
    children = node.value or {}
    below = children.get(head, Node(None, origin, (*done, head)))
    new = _assign(below, rest, (*done, head), text, origin, problems)
    return Node({**children, head: new}, node.origin, node.path)


def _no_entry(key: str, entries: list[Node]) -> str:
    names = [
        str(entry.value["name"].value) for entry in entries if isinstance(entry.value, dict) and "name" in entry.value
    ]
    listed = (
        f" ({', '.join(f'{index}: {name}' for index, name in enumerate(names))})" if len(names) == len(entries) else ""
    )
    if not entries:
        return f"`{key}` is empty in the run file; there is no entry to change"
    return f"`{key}` has entries 0 to {len(entries) - 1}{listed}; use one of these numbers"
