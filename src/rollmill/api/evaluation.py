"""Evaluation as a function: a run's checkpoint, or any model that a script holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from rollmill.api.foreground import run_in_foreground
from rollmill.api.inputs import INPUTS, RUN_FILE, RunInputs
from rollmill.config.evaluation import EvaluationConfig
from rollmill.config.loader import load_evaluation_run
from rollmill.config.rollout import RolloutConfig
from rollmill.config.yaml_file import write_yaml
from rollmill.errors import ConfigError
from rollmill.files import atomic_write

_CONFIG = "config.yaml"


@runtime_checkable
class HasFolder(Protocol):
    """A run, by its run directory."""

    folder: Path


def evaluate(
    model: Any,
    step: int | None = None,
    *,
    dataset: Any = None,
    rewards: Any = None,
    tokenizer: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Measure a run's checkpoint by the run's own evaluation, or any model on a dataset.

    Args:
        model: a run or its directory, a model's folder or hub id, or a loaded transformers model.
        step: of a run's checkpoint; default: the newest.
        dataset, rewards: the held-out tasks and what scores them, as for a run; default: those of the run.
        tokenizer: of a loaded model.
        settings: keys of `evaluation` (`samples=8`, `k=[1, 8]`, `limit=100`) and of `rollout` (`max_new_tokens=64`).

    Returns the metrics, such as eval/greedy and eval/sampled.

    Raises:
        ConfigError: there is nothing to evaluate, or a setting is wrong.
        CheckpointError: the run has no such checkpoint.
    """
    folder = model.folder if isinstance(model, HasFolder) else model
    is_run = isinstance(folder, str | Path) and (Path(folder) / _CONFIG).is_file()
    if is_run and dataset is None and rewards is None:
        from rollmill import launch

        overrides = [f"evaluation.{key}={json.dumps(value)}" for key, value in settings.items()]
        return run_in_foreground(lambda view, interrupts: launch.evaluate(folder, step, overrides))
    if dataset is None or (rewards is None and not is_run):
        raise ConfigError("evaluate: a model needs `dataset` and `rewards`; only a run's own evaluation has both")
    with TemporaryDirectory(prefix="rollmill-evaluate-") as temporary:
        inputs = RunInputs(Path(temporary) / INPUTS)
        target = Path(folder) if is_run else Path(inputs.model(model, tokenizer)["path"])
        values = _evaluation_file(dataset, rewards, settings)
        if is_run and rewards is None:
            values["rewards"] = load_evaluation_run(Path(folder) / _CONFIG).stages[-1].rewards
        file = Path(temporary) / RUN_FILE
        atomic_write(file, write_yaml(inputs.section(values)).encode())
        return run_in_foreground(lambda view, interrupts: _measure(target, step, file, Path(temporary)))


def _evaluation_file(dataset: Any, rewards: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    evaluation: dict[str, Any] = {"taskset": dataset}
    rollout: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in EvaluationConfig.model_fields and key not in RolloutConfig.model_fields:
            raise ConfigError(f"evaluate: no setting `{key}`; give keys of `evaluation` and `rollout`")
        (evaluation if key in EvaluationConfig.model_fields else rollout)[key] = value
    return {"evaluation": evaluation, "rollout": rollout, "rewards": rewards}


def _measure(target: Path, step: int | None, file: Path, folder: Path) -> dict[str, Any]:
    from rollmill.orchestrator.bench import bench, settings_of
    from rollmill.orchestrator.eval_targets import find_eval_targets

    chosen = find_eval_targets([target], "last" if step is None else str(step))
    loaded, stage = settings_of(file, chosen, (), None, ())
    results = bench(loaded, stage, chosen, folder, lambda text: None)
    [cell] = results.cells
    return cell.result.metrics() | ({} if cell.subject.step is None else {"step": cell.subject.step})
