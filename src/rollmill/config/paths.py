"""Resolution of relative paths: in the current folder first, then in the folder of the file that contains them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rollmill.config.hub import HubKind, HubReference, fetch_named, parse_reference
from rollmill.config.tree import ConfigProblem, Node, edit, format_key_path, truncate_text
from rollmill.errors import ConfigError
from rollmill.user_code import STORED

_HELD_OUT_SETS = [["evaluation"], ["evaluation", "sets", "*"]]
_SECTIONS = [[*of, "taskset", *entry] for of in ([], *_HELD_OUT_SETS) for entry in ([], ["mix", "*"])]
"""Key patterns of the taskset sections of a stage."""
_HELD_OUT = ["pipeline", "*", "against", "*"]
_TASKS = [[*section, *rows] for section in _SECTIONS for rows in ([], _HELD_OUT)]
_REWARDS = [
    *([*of, "rewards", "*"] for of in ([], *_HELD_OUT_SETS)),
    *(["pipeline", "*", *inner] for inner in (["rewards", "*"], ["reward"], ["code"])),
]
_STAGE = [
    *([*rows, "path"] for rows in _TASKS),
    *([*section, "pipeline", "*", "scores"] for section in _SECTIONS),
    ["algorithm", "teacher"],
    ["workflow", "folder"],
    *([*reward, "path"] for reward in _REWARDS),
    *([*reward, "files", "*"] for reward in _REWARDS),
    *([*of, "environment", *key] for of in ([], *_HELD_OUT_SETS) for key in (["dockerfile"], ["files", "*"])),
    ["tools", "*", "path"],
    ["models", "*", "path"],
]
_STAGE_CODE = [
    *([*rows, "function"] for rows in _TASKS),
    *([*reward, key] for reward in _REWARDS for key in ("function", "judge")),
    ["environment", "describe"],
]

_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)((?!:memory:)[^/].*)")


def resolve_paths(root: Node, problems: list[ConfigProblem], *, required: bool) -> Node:
    """Returns the tree with absolute paths: `model.path`, `plugins`, those of tasksets, rewards, environments, tools
    and models, `FILE.py:NAME` functions, and the SQLite file in `buffer.url`.

    A path that does not exist is a problem if `required`; otherwise it stays as written.
    """

    def settle(node: Node) -> Node:
        new_model = node.path == ("model", "path") and node.value == "new"
        if not isinstance(node.value, str) or new_model:
            return node
        if (reference := _hub_reference(node)) is not None:
            return _fetched(node, reference, problems) if required else node
        return _changed(node, _lookup(node, node.value, problems, required))

    def settle_code(node: Node) -> Node:
        file, colon, name = str(node.value).rpartition(":")
        if not colon or not file.endswith((".py", STORED)):
            return node
        return _changed(node, f"{_lookup(node, file, problems, required)}:{name}")

    def settle_source(node: Node) -> Node:
        return node if node.value in ("taskset", "run") else settle(node)

    def settle_file(node: Node) -> Node:
        return settle(node) if str(node.value).endswith(".py") else node

    def settle_folder(node: Node) -> Node:
        """Resolves a path that is never the name of a data set of the hub."""
        return _changed(node, _lookup(node, node.value, problems, required)) if isinstance(node.value, str) else node

    def settle_python(node: Node) -> Node:
        """Resolves the path of a Python interpreter, which need not exist yet. Symbolic links are kept."""
        if not isinstance(node.value, str):
            return node
        return _changed(node, _lookup(node, node.value, problems, required=False))

    def settle_argument(node: Node) -> Node:
        """Resolves a command's argument if it names an existing file; any other text is kept."""
        if not isinstance(node.value, str) or not Path(node.value).suffix:
            return node
        found = _lookup(node, node.value, problems, required=False)
        return _changed(node, found) if Path(found).is_file() else node

    def settle_new(node: Node) -> Node:
        """Resolves a folder that may still have to be created, relative to the current folder."""
        return _changed(node, os.path.abspath(Path(str(node.value)).expanduser())) if node.value is not None else node

    for pattern in [["model", "path"], ["plugins", "*"]]:
        root = edit(root, pattern, settle)
    root = edit(root, ["placement", "explorers", "*", "engine", "python"], settle_python)
    for prefix in ([], ["stages", "*"], ["domains", "*"], ["stages", "*", "domains", "*"]):
        for pattern in _STAGE:
            root = edit(root, prefix + pattern, settle)
        for pattern in _STAGE_CODE:
            root = edit(root, prefix + pattern, settle_code)
        for rows in _TASKS:
            root = edit(root, [*prefix, *rows, "harbor"], settle_folder)
        root = edit(root, [*prefix, "offline_data", "sources", "*"], settle_source)
        root = edit(root, [*prefix, "workflow", "taskset"], settle_file)
        for section in ("workflow", "engine"):
            root = edit(root, [*prefix, section, "python"], settle_python)
        root = edit(root, [*prefix, "offload", "folder"], settle_new)
        root = edit(root, [*prefix, "buffer", "url"], _settle_url)
        root = edit(root, [*prefix, "workflow", "command", "*"], settle_argument)
    return root


def _settle_url(node: Node) -> Node:
    """Resolves the file of a SQLite URL, which need not exist."""
    match = _SQLITE_FILE.fullmatch(str(node.value))
    return node if match is None else _changed(node, match[1] + os.path.abspath(match[2]))


def _hub_reference(node: Node) -> HubReference | None:
    """Returns the repository that a value names, unless it is a path here."""
    text, folders = str(node.value), [Path.cwd(), node.origin.folder.absolute()]
    if any(os.path.exists(folder / os.path.expanduser(text)) for folder in folders):
        return None
    named = "taskset" in node.path or node.path == ("model", "path")
    return parse_reference(text, folders) if named or text.startswith("hf:") else None


def _fetched(node: Node, reference: HubReference, problems: list[ConfigProblem]) -> Node:
    try:
        kind: HubKind = "dataset" if "taskset" in node.path else "model"
        return _changed(node, str(fetch_named(str(node.value), reference, kind)))
    except ConfigError as error:
        problems.append(ConfigProblem(node.origin.place, format_key_path(node.path), str(error)))
        return node


def _changed(node: Node, value: str) -> Node:
    return Node(value, node.origin, node.path)


def _lookup(node: Node, text: str, problems: list[ConfigProblem], required: bool) -> str:
    path = Path(os.path.expanduser(text))  # pathlib's raises for an unknown user
    folders = list(dict.fromkeys([Path.cwd(), node.origin.folder.absolute()]))
    for folder in folders:
        if os.path.exists(folder / path):  # pathlib's raises for names that are too long and folders that are closed
            return os.path.abspath(folder / path)
    if required:
        looked = "" if path.is_absolute() else f" (looked in {' and '.join(str(folder) for folder in folders)})"
        problems.append(
            ConfigProblem(
                node.origin.place,
                format_key_path(node.path),
                f"{truncate_text(text)} does not exist{looked}; {_advice(node)}",
            )
        )
    return text


def _advice(node: Node) -> str:
    if node.path[0] == "model":
        advice = (
            "give the folder of a checkpoint or a GGUF file on this machine, `hf://ORG/NAME` for one of the hub, or"
        )
        return f"{advice} `new`"
    if "rewards" in node.path and node.path[-1] == "path":
        return "give the folder of a reward model on this machine, or `hf://ORG/NAME` for one of the hub"
    if "sources" in node.path:
        return "give `taskset`, `run`, the directory of a run, or a Parquet file"
    return "correct the path"
