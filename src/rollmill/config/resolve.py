"""Validates a configuration tree: the run-wide settings and one complete set of sections per stage."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import ConfigProblem, Node, format_key_path, merge_trees, raise_problems, to_plain_data
from rollmill.config.validation_errors import explain_validation_error

STAGE_KEYS = frozenset(StageConfig.model_fields) - {"name"}
RUN_KEYS = frozenset(RunConfig.model_fields) - STAGE_KEYS


@dataclass(frozen=True)
class ResolvedRun:
    """A validated run and the trees it was validated from."""

    config: RunConfig
    stages: list[StageConfig]
    root: Node
    trees: list[Node]


def resolve(root: Node) -> ResolvedRun:
    """Overlays the stages and validates everything.

    `config` holds the run-wide settings; its stage sections are those of the first stage. Raises ConfigError with every
    problem found.
    """
    problems: list[ConfigProblem] = []
    trees = _stage_trees(root, problems)
    raise_problems(problems)
    stages = [stage for tree in trees if (stage := _stage(tree, problems)) is not None]
    first = {key: node for key, node in trees[0].value.items() if key in STAGE_KEYS}
    run_wide = {key: node for key, node in root.value.items() if key not in STAGE_KEYS}
    config = _run(Node(first | run_wide, root.origin, root.path), problems)
    raise_problems(problems)
    assert config is not None
    return ResolvedRun(config, stages, root, trees)


def _stage_trees(root: Node, problems: list[ConfigProblem]) -> list[Node]:
    base = {key: node for key, node in root.value.items() if key in STAGE_KEYS}
    listed = root.value.get("stages")
    if listed is None or listed.value in (None, []):
        return [Node(base, root.origin, root.path)]
    if not isinstance(listed.value, list) or not all(isinstance(entry.value, dict) for entry in listed.value):
        problems.append(ConfigProblem(listed.origin.place, "stages", "expected a list of sections, each with a `name`"))
        return []
    _check_names(listed.value, problems)
    return [merge_trees(Node(base, root.origin, root.path), entry) for entry in listed.value]


def _check_names(entries: list[Node], problems: list[ConfigProblem]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        name = entry.value.get("name")
        if name is None:
            text = "is required: every stage has a name of its own"
            problems.append(ConfigProblem(entry.origin.place, format_key_path((*entry.path, "name")), text))
        elif (value := str(name.value)) in seen:
            text = f"`{value}` is already the name of the stage at {seen[value]}; rename one of them"
            problems.append(ConfigProblem(name.origin.place, format_key_path(name.path), text))
        else:
            seen[value] = name.origin.place


def _stage(tree: Node, problems: list[ConfigProblem]) -> StageConfig | None:
    try:
        return StageConfig.model_validate(to_plain_data(tree))
    except ValidationError as error:
        problems += explain_validation_error(error, StageConfig, tree)
        return None


def _run(tree: Node, problems: list[ConfigProblem]) -> RunConfig | None:
    try:
        return RunConfig.model_validate(to_plain_data(tree))
    except ValidationError as error:
        problems += explain_validation_error(error, RunConfig, tree, skip=STAGE_KEYS)
        return None
