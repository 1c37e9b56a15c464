"""Loads a run file: includes, overrides, paths, stages, validation and the capability check, in this order."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollmill.config.checks.capability import check_capabilities, find_unused_keys, unused_run_keys
from rollmill.config.checks.pictures import require_picture_support
from rollmill.config.hub import with_references
from rollmill.config.model import AuxiliaryModelConfig
from rollmill.config.paths import resolve_paths
from rollmill.config.resolve import RUN_KEYS, STAGE_KEYS, resolve
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.section import expand_name
from rollmill.config.supervision import SupervisionConfig
from rollmill.config.tree import (
    ConfigProblem,
    Key,
    Node,
    Origin,
    expand_shorthand,
    find,
    format_key_path,
    iter_leaves,
    locate_key,
    merge_trees,
    raise_problems,
    to_plain_data,
    truncate_text,
)
from rollmill.config.validation_errors import explain_validation_error
from rollmill.config.yaml_file import parse_override_value, read_yaml, write_yaml
from rollmill.errors import ConfigError
from rollmill.files import describe_non_file
from rollmill.user_code import import_file

# Overrides (`--set section.key=value`)

_DEEPEST = 50
"""Maximum number of keys in one override, as for nesting in files."""


def apply_override(root: Node, assignment: str, folder: Path, problems: list[ConfigProblem]) -> Node:
    """Returns the tree with one `section.key=value` applied. List entries are addressed by index
    (`rewards.0.weight=2`)."""
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


@dataclass(frozen=True)
class LoadedRun:
    """A run that is ready to start.

    `config` holds the run-wide settings (name, seed, model, checkpoint ...), and the stage sections of the first stage.
    `stages` holds all stages, in order. `path` is the run file and `out` the run directory (default: runs/NAME).
    """

    config: RunConfig
    stages: list[StageConfig]
    path: Path
    out: Path

    def resolved(self) -> dict[str, Any]:
        """Returns the whole run as one JSON-able mapping, defaults included. As YAML it is a run file that loads to
        this run.

        Keys without effect in this run are left out. What comes from the hub is named with its commit.
        """
        wide = self.config.model_dump(mode="json", include=set(RUN_KEYS - {"stages"}))
        stages = [_stage_dump(stage) for stage in self.stages]
        single = {key: value for key, value in stages[0].items() if key in STAGE_KEYS}
        whole = wide | ({"stages": stages} if self.config.stages else single)
        for path in unused_run_keys(self.config, self.stages):
            _drop(whole, path)
        references: dict[str, Any] = with_references(whole)
        return references

    def to_yaml(self) -> str:
        return write_yaml(self.resolved())


_MOST_FILES = 50
"""Maximum number of files of one run; a file counts each time it is included."""
_OF_EVALUATIONS = frozenset({"evaluation", "rewards", "reward_settings", "workflow", "environment", "tools", "models"})


def load_run(
    path: Path,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    require_files: bool = True,
    keys: frozenset[str] | None = None,
) -> LoadedRun:
    """Loads and checks a run file.

    `overrides` are `section.key=value` strings, applied in order after the includes. Relative paths are looked up in
    the current folder, then in the folder of the file that names them; with `require_files` a missing one is an error.
    With `keys`, only these top-level keys are checked for conflicts.

    Raises ConfigError; its message lists every problem as `FILE:LINE: section.key: what is wrong; what to do`.
    """
    problems: list[ConfigProblem] = []
    root = _with_includes(path, problems, (), [])
    for assignment in overrides:
        root = apply_override(root, assignment, path.parent, problems)
    root = resolve_paths(root, problems, required=require_files)
    problems += [
        ConfigProblem(leaf.origin.place, format_key_path(leaf.path), f"expected a finite number, found `{leaf.value}`")
        for leaf in iter_leaves(root)
        if isinstance(leaf.value, float) and not math.isfinite(leaf.value)
    ]
    raise_problems(problems)
    _import_plugins(root)
    resolved = resolve(root)
    found = check_capabilities(resolved)
    raise_problems(found if keys is None else [each for each in found if _first(each.key) in keys])
    stages = [StageConfig.model_validate(_stage_dump(stage)) for stage in resolved.stages]
    first = {key: getattr(stages[0], key) for key in STAGE_KEYS}
    if keys is None:
        require_picture_support(resolved.config.model, stages)
    return LoadedRun(resolved.config.model_copy(update=first), stages, path, out or Path("runs") / resolved.config.name)


def load_supervision(path: Path, overrides: Sequence[str] = (), *, serves: bool = False) -> SupervisionConfig | None:
    """Loads only `supervise` of a run file, without its plugins, for a process that supervises the run.

    None if there is nothing to supervise: in modes that do not train, on Ray (whose supervisor is another one), and if
    the file is wrong, so that `load_run` will say how.

    Args:
        serves: mode `serve` trains, too.
    """
    problems: list[ConfigProblem] = []
    try:
        root = _with_includes(path, problems, (), [])
        for assignment in overrides:
            root = apply_override(root, assignment, path.parent, problems)
        raise_problems(problems)
        values = to_plain_data(root)
        placement = expand_name(values.get("placement"))
        on_ray = isinstance(placement, dict) and placement.get("name") == "ray"
        if on_ray or values.get("mode", "both") not in ("both", "train", *(["serve"] if serves else [])):
            return None
        return SupervisionConfig.model_validate(values.get("supervise") or {})
    except (ConfigError, ValidationError):
        return None


def load_taskset_run(path: Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Loads a run file, or a part of one with a `taskset`, to inspect tasks and rewards. It needs no model.

    Raises ConfigError like `load_run`, and if there is no taskset.
    """
    return load_run(path, overrides, keys=_OF_EVALUATIONS | {"taskset"})


def _first(key: str) -> str:
    """Returns the top-level key of a problem, of the whole file or of a stage."""
    parts = key.split(".")
    return parts[2] if parts[0] == "stages" and len(parts) > 2 else parts[0]


def load_evaluation_run(path: Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Loads a run file, or a part of one with an `evaluation`, to evaluate only. It needs neither a model nor training
    tasks.

    Raises ConfigError like `load_run`.
    """
    return load_run(path, overrides, keys=_OF_EVALUATIONS)


def _import_plugins(root: Node) -> None:
    """Imports plugins before the sections are checked, because they register components that sections name."""
    listed = find(root, ("plugins",))
    entries = listed.value if listed is not None and isinstance(listed.value, list) else []
    for entry in entries:
        if isinstance(entry.value, str) and os.path.exists(entry.value):
            import_file(Path(entry.value))


def _with_includes(path: Path, problems: list[ConfigProblem], above: tuple[Path, ...], read: list[Path]) -> Node:
    """Returns the tree of a file merged over its includes; `read` collects all files of the run."""
    read.append(path)
    root = read_yaml(path, problems, included=bool(above))
    include = root.value.pop("include", None)
    if include is None:
        return root
    entries = include.value if isinstance(include.value, list) else [include]
    chain = (*above, path)
    below: Node | None = None
    for entry in entries:
        if not isinstance(entry.value, str):
            raise ConfigError(f"{entry.origin.place}: include: expected a path or a list of paths")
        if len(read) >= _MOST_FILES:
            raise ConfigError(f"{entry.origin.place}: include: more than {_MOST_FILES} files in one run; include fewer")
        tree = _with_includes(_included(path, entry, chain), problems, chain, read)
        below = tree if below is None else merge_trees(below, tree)
    return root if below is None else merge_trees(below, root)


def _included(path: Path, entry: Node, chain: tuple[Path, ...]) -> Path:
    file = path.parent / str(entry.value)
    what = describe_non_file(file)
    if what is not None:
        what = f"does not exist; the path is relative to {path}" if what == "no such file" else what
        raise ConfigError(f"{entry.origin.place}: include: {file} {what}")
    if file.resolve() in [one.resolve() for one in chain]:
        cycle = " -> ".join(str(one) for one in (*chain, file))
        raise ConfigError(
            f"{entry.origin.place}: include: files include each other: {cycle}; remove one of the includes"
        )
    return file


def _stage_dump(stage: StageConfig) -> dict[str, Any]:
    values = stage.model_dump(mode="json")
    for path in find_unused_keys(stage):
        _drop(values, path)
    return values


def _drop(values: dict[str, Any], path: Sequence[int | str]) -> None:
    *sections, key = path
    inner: Any = values
    for section in sections:
        inner = inner[int(section)] if isinstance(inner, list) else (inner or {}).get(section)
    if inner:
        inner.pop(key, None)


# Served models

_NOT_HERE = {
    "path": "name the folder itself",
    "policy": "name the run itself",
    "temperature": "`rollout`, or `evaluation.sampling`, says how completions are sampled",
    "max_new_tokens": "`rollout`, or `evaluation.sampling`, says how long completions may be",
}


def load_served_model(path: Path) -> AuxiliaryModelConfig:
    """Loads the file of a served model: an OpenAI-compatible endpoint, with the keys of `models.NAME`.

    Raises ConfigError with the wrong keys and their lines, like `load_run`.
    """
    problems: list[ConfigProblem] = []
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; write one with the `endpoint` of a server and the name of its `model`"
        )
    tree = read_yaml(path, problems)
    raise_problems(problems)
    for key, instead in _NOT_HERE.items():
        if key in tree.value:
            place, name = locate_key(tree, (key,))
            problems.append(
                ConfigProblem(place, name, f"not honoured in the file of a served model: {instead}; remove it")
            )
    if find(tree, ("endpoint",)) is None and tree.value.keys() <= AuxiliaryModelConfig.model_fields.keys():
        problems.append(
            ConfigProblem(str(path), "endpoint", "is missing; give the base URL of an OpenAI-compatible server")
        )
    raise_problems(problems)
    try:
        return AuxiliaryModelConfig.model_validate(to_plain_data(tree))
    except ValidationError as error:
        raise_problems(explain_validation_error(error, AuxiliaryModelConfig, tree))
        raise
