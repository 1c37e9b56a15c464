"""A file that describes a served model: an OpenAI-compatible endpoint, with the keys of `models.NAME`."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from rollmill.config.other_models import AuxiliaryModelConfig
from rollmill.config.tree import ConfigProblem, find, locate_key, raise_problems, to_plain_data
from rollmill.config.validation_errors import explain_validation_error
from rollmill.config.yaml_file import read_yaml
from rollmill.errors import ConfigError

_NOT_HERE = {
    "path": "name the folder itself",
    "policy": "name the run itself",
    "temperature": "`rollout`, or `evaluation.sampling`, says how completions are sampled",
    "max_new_tokens": "`rollout`, or `evaluation.sampling`, says how long completions may be",
}


def load_served_model(path: Path) -> AuxiliaryModelConfig:
    """Read the file. Raises ConfigError, as `load_run` does: what is wrong, and on which line."""
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
