"""Models that `rollmill bench` compares: checkpoints of runs, model folders, and served models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rollmill.config.loader import load_run, load_served_model
from rollmill.config.model import AuxiliaryModelConfig, ModelConfig
from rollmill.errors import CheckpointError, ConfigError, ModelError
from rollmill.models.gguf import find_gguf
from rollmill.models.load import PolicyModel
from rollmill.models.lora import ADAPTER_FOLDER, load_adapter
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.manifest import STATE, model_files, verifying
from rollmill.trackers.metrics_log import read_summary
from rollmill.trainer.parity import load_verified_policy

RUN_FILE = "config.yaml"
_FILES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class CheckpointTarget:
    """A model to evaluate. `run` and `step` are set for a run's checkpoint."""

    label: str
    folder: Path
    run: Path | None = None
    step: int | None = None

    def load(self, seed: int, device: torch.device) -> PolicyModel:
        """Load the model. Raises CheckpointError or ModelError if it is missing, incomplete or damaged."""
        if not self.folder.exists():
            advice = "a run that goes on keeps its newest and best ones; name one that is there, or raise checkpoint."
            raise CheckpointError(f"{self.label}: {self.folder} is not there any more; {advice}keep_last")
        try:
            with verifying(self.folder, model_files):
                return self._load(seed, device)
        except ModelError as error:
            raise ModelError(f"{self.label} cannot be evaluated: {error}") from error

    def _load(self, seed: int, device: torch.device) -> PolicyModel:
        if self.run is None:
            return load_verified_policy(
                ModelConfig(path=self.folder), texts=[], seed=seed, device=device, pictures=True
            )
        model = load_run(self.run / RUN_FILE, out=self.run).config.model
        if model.lora is None:
            path = ModelConfig(path=self.folder, trust_remote_code=model.trust_remote_code)
            return load_verified_policy(path, texts=[], seed=seed, device=device, pictures=True)
        policy = load_verified_policy(model, texts=[], seed=seed, device=device, pictures=True)
        load_adapter(policy.model, self.folder / ADAPTER_FOLDER)
        return policy

    def identity(self) -> str:
        """A text that changes when the weights are replaced: the folder, and the weights' modification times."""
        patterns = ("**/*.safetensors", "pytorch_model*.bin", "*.gguf")
        found = [file for pattern in patterns for file in self.folder.glob(pattern)]
        weights = [self.folder] if self.folder.is_file() else sorted(found)
        return "|".join([str(self.folder.resolve()), *(str(each.stat().st_mtime_ns) for each in weights)])


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """A model behind an OpenAI-compatible endpoint, described in a file."""

    label: str
    folder: Path  #: the file
    model: AuxiliaryModelConfig
    run: None = None
    step: None = None

    def identity(self) -> str:
        """The endpoint's settings. Changes of the served weights cannot be detected."""
        return self.model.model_dump_json(include={"endpoint", "model", "completes", "options"})


EvalTarget = CheckpointTarget | ServedTarget


def find_eval_targets(paths: Sequence[Path], steps: str = "last") -> list[EvalTarget]:
    """Find the run directories' checkpoints, chosen by `steps`, and the model folders and served models among `paths`.

    Args:
        steps: `last`, `all`, `best` (of the run's own evaluations), or comma-separated numbers.

    Raises:
        ConfigError: a path is neither a run directory nor a model, or `steps` cannot be read.
        CheckpointError: a run has no such checkpoint.
    """
    found = [each for path in paths for each in _of_path(path, steps)]
    if steps != "last" and all(each.run is None for each in found):
        raise ConfigError(f"--step {steps} chooses among the checkpoints of run directories; name one, or leave it out")
    counts = Counter(each.label for each in found)
    found = [replace(each, label=_full(each)) if counts[each.label] > 1 else each for each in found]
    labels = [each.label for each in found]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(f"{twice[0]} is there twice; name every model once")
    return found


def _of_path(path: Path, steps: str) -> list[EvalTarget]:
    if (path / RUN_FILE).is_file():
        name = path.resolve().name
        return [
            CheckpointTarget(f"{name}@{step}", Checkpoints(path).path(step), path, step)
            for step in _chosen(path, steps)
        ]
    if (path / "config.json").is_file() or find_gguf(path) is not None:
        return [CheckpointTarget(path.resolve().name, path)]
    if path.suffix in _FILES and path.is_file():
        return [ServedTarget(path.stem, path, load_served_model(path))]
    what = "holds neither" if path.is_dir() else "is no folder with"
    advice = "give a run directory, a model, or a file (.yaml) with an endpoint"
    raise ConfigError(f"{path} {what} a run ({RUN_FILE}) nor a model (config.json, or a .gguf file); {advice}")


def _full(subject: EvalTarget) -> str:
    return str(subject.folder) if subject.run is None else f"{subject.run}@{subject.step}"


def _best_so_far(run: Path, newest: int) -> int | None:
    """The best step of an unfinished run, by its newest checkpoint."""
    try:
        best: int | None = json.loads((Checkpoints(run).path(newest) / STATE).read_text())["best_step"]
    except (OSError, ValueError, KeyError):
        return None
    return best


def _chosen(run: Path, steps: str) -> list[int]:
    known = Checkpoints(run).steps()
    have = ", ".join(map(str, known)) or "none"
    if not known:
        raise CheckpointError(f"{run} has no checkpoint yet; resume it, or give another run")
    if steps == "all":
        return known
    if steps == "last":
        return known[-1:]
    if steps == "best":
        best = read_summary(run).get("best_step", _best_so_far(run, known[-1]))
        if best not in known:
            raise CheckpointError(f"{run}: its best checkpoint (step {best}) is not there; it has: {have}")
        return [best]
    try:
        wanted = [int(each) for each in steps.split(",")]
    except ValueError:
        raise ConfigError(f"--step {steps}: expected last, best, all, or numbers such as 100,200") from None
    if missing := [step for step in wanted if step not in known]:
        raise CheckpointError(f"{run} has no checkpoint of step {missing[0]}; it has: {have}")
    return list(dict.fromkeys(wanted))
