"""Loading a run file: includes, overrides, paths, stages, validation and the capability check, in this order."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.config.checks.capability import check_capabilities, find_unused_keys, unused_run_keys
from rollmill.config.overrides import apply_override
from rollmill.config.paths import resolve_paths
from rollmill.config.resolve import RUN_KEYS, STAGE_KEYS, resolve
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import ConfigProblem, Node, find, format_key_path, iter_leaves, merge_trees, raise_problems
from rollmill.config.yaml_file import read_yaml, write_yaml
from rollmill.errors import ConfigError
from rollmill.registry import import_file
from rollmill.strict_files import describe_non_file


@dataclass(frozen=True)
class LoadedRun:
    """A run that is ready to start.

    `config` holds the run-wide settings (name, seed, model, checkpoint ...); what a stage does stands in `stages`, in
    order. The stage sections of `config` are those of the first stage. `path` is the run file and `out` the run
    directory (default: runs/NAME).
    """

    config: RunConfig
    stages: list[StageConfig]
    path: Path
    out: Path

    def resolved(self) -> dict[str, Any]:
        """The whole run as one JSON-able mapping, defaults included. As YAML it is a run file that loads to this run.

        Keys that nothing in this run honours are left out.
        """
        wide = self.config.model_dump(mode="json", include=set(RUN_KEYS - {"stages"}))
        stages = [_stage_dump(stage) for stage in self.stages]
        single = {key: value for key, value in stages[0].items() if key in STAGE_KEYS}
        whole = wide | ({"stages": stages} if self.config.stages else single)
        for path in unused_run_keys(self.config, self.stages):
            _drop(whole, path)
        return whole

    def to_yaml(self) -> str:
        """`resolved()` as YAML."""
        return write_yaml(self.resolved())


_MOST_FILES = 50
"""Most files of one run, each counted as often as it is included."""
_OF_EVALUATIONS = frozenset({"evaluation", "rewards", "judging", "workflow", "environment", "tools", "models"})


def load_run(
    path: Path,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    require_files: bool = True,
    keys: frozenset[str] | None = None,
) -> LoadedRun:
    """Load and check a run file.

    `overrides` are `section.key=value` strings, applied in order after the includes. Relative paths are looked up in
    the current folder, then in the folder of the file that names them; with `require_files` a missing one is an error.
    With `keys` only these top-level keys have to fit together.
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
    return LoadedRun(resolved.config.model_copy(update=first), stages, path, out or Path("runs") / resolved.config.name)


def load_taskset_run(path: Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """A run file, or a part of one with a `taskset`, for looking at tasks and rewards alone: it needs no model.

    Raises ConfigError like `load_run`, and where there is no taskset.
    """
    return load_run(path, overrides, keys=_OF_EVALUATIONS | {"taskset"})


def _first(key: str) -> str:
    """The top-level key that a problem is in, of the whole file or of a stage."""
    parts = key.split(".")
    return parts[2] if parts[0] == "stages" and len(parts) > 2 else parts[0]


def load_evaluation_run(path: Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """A run file, or a part of one with an `evaluation`, for evaluating alone: it needs neither a model nor tasks to
    train on. Raises ConfigError like `load_run`.
    """
    return load_run(path, overrides, keys=_OF_EVALUATIONS)


def _import_plugins(root: Node) -> None:
    """Before the sections are checked, because plugins register what those name."""
    listed = find(root, ("plugins",))
    entries = listed.value if listed is not None and isinstance(listed.value, list) else []
    for entry in entries:
        if isinstance(entry.value, str) and os.path.exists(entry.value):
            import_file(Path(entry.value))


def _with_includes(path: Path, problems: list[ConfigProblem], above: tuple[Path, ...], read: list[Path]) -> Node:
    """The tree of a file over those that it includes; `read` collects all files of the run."""
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
