"""From a tree to a validated run: the run-wide settings and one complete section set per stage."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from rollmill.config.explain import explain
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import Node, Problem, dotted, overlay, plain, refuse

STAGE_KEYS = frozenset(StageConfig.model_fields) - {"name"}
RUN_KEYS = frozenset(RunConfig.model_fields) - STAGE_KEYS


@dataclass(frozen=True)
class Resolved:
    """A validated run, with the trees it was validated from."""

    config: RunConfig
    stages: list[StageConfig]
    root: Node
    trees: list[Node]


def resolve(root: Node) -> Resolved:
    """Overlay the stages and validate everything.

    `config` holds the run-wide settings; its stage sections are those of the first stage. Raises ConfigError with
    every problem found.
    """
    problems: list[Problem] = []
    trees = _stage_trees(root, problems)
    refuse(problems)
    stages = [stage for tree in trees if (stage := _stage(tree, problems)) is not None]
    first = {key: node for key, node in trees[0].value.items() if key in STAGE_KEYS}
    run_wide = {key: node for key, node in root.value.items() if key not in STAGE_KEYS}
    config = _run(Node(first | run_wide, root.origin, root.path), problems)
    refuse(problems)
    assert config is not None
    return Resolved(config, stages, root, trees)


def _stage_trees(root: Node, problems: list[Problem]) -> list[Node]:
    base = {key: node for key, node in root.value.items() if key in STAGE_KEYS}
    listed = root.value.get("stages")
    if listed is None or listed.value in (None, []):
        return [Node(base, root.origin, root.path)]
    if not isinstance(listed.value, list) or not all(isinstance(entry.value, dict) for entry in listed.value):
        problems.append(Problem(listed.origin.place, "stages", "expected a list of sections, each with a `name`"))
        return []
    _check_names(listed.value, problems)
    return [overlay(Node(base, root.origin, root.path), entry) for entry in listed.value]


def _check_names(entries: list[Node], problems: list[Problem]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        name = entry.value.get("name")
        if name is None:
            text = "is required: every stage has a name of its own"
            problems.append(Problem(entry.origin.place, dotted((*entry.path, "name")), text))
        elif (value := str(name.value)) in seen:
            text = f"`{value}` is already the name of the stage at {seen[value]}; rename one of them"
            problems.append(Problem(name.origin.place, dotted(name.path), text))
        else:
            seen[value] = name.origin.place


def _stage(tree: Node, problems: list[Problem]) -> StageConfig | None:
    try:
        return StageConfig.model_validate(plain(tree))
    except ValidationError as error:
        problems += explain(error, StageConfig, tree)
        return None


def _run(tree: Node, problems: list[Problem]) -> RunConfig | None:
    try:
        return RunConfig.model_validate(plain(tree))
    except ValidationError as error:
        problems += explain(error, RunConfig, tree, skip=STAGE_KEYS)
        return None
