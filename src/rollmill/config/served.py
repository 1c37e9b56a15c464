"""A file that describes a served model: an OpenAI-compatible endpoint, with the keys of `models.NAME`."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from rollmill.config.explain import explain
from rollmill.config.other_models import OtherModelConfig
from rollmill.config.tree import Problem, find, locate, plain, refuse
from rollmill.config.yaml_file import read_yaml
from rollmill.core.errors import ConfigError

_NOT_HERE = {
    "path": "name the folder itself",
    "policy": "name the run itself",
    "temperature": "`rollout`, or `evaluation.sampling`, says how completions are sampled",
    "max_new_tokens": "`rollout`, or `evaluation.sampling`, says how long completions may be",
}


def load_served(path: Path) -> OtherModelConfig:
    """Read the file. Raises ConfigError, as `load_run` does: what is wrong, and on which line."""
    problems: list[Problem] = []
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; write one with the `endpoint` of a server and the name of its `model`"
        )
    tree = read_yaml(path, problems)
    refuse(problems)
    for key, instead in _NOT_HERE.items():
        if key in tree.value:
            place, name = locate(tree, (key,))
            problems.append(Problem(place, name, f"not honoured in the file of a served model: {instead}; remove it"))
    if find(tree, ("endpoint",)) is None and tree.value.keys() <= OtherModelConfig.model_fields.keys():
        problems.append(Problem(str(path), "endpoint", "is missing; give the base URL of an OpenAI-compatible server"))
    refuse(problems)
    try:
        return OtherModelConfig.model_validate(plain(tree))
    except ValidationError as error:
        refuse(explain(error, OtherModelConfig, tree))
        raise
