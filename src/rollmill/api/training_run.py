"""A training run from Python: settings become a run file, which is checked and run like that of `rollmill run`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakValueDictionary

from rollmill.api.evaluation import evaluate
from rollmill.api.inputs import INPUTS, RUN_FILE, RunInputs
from rollmill.config.algorithms import known_algorithms
from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import RunConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.config.yaml_file import write_yaml
from rollmill.errors import ConfigError
from rollmill.files import atomic_write
from rollmill.startup import quick_imports
from rollmill.user_code import did_you_mean

if TYPE_CHECKING:
    from rollmill.orchestrator.interrupt import Interrupts
    from rollmill.orchestrator.run_control import Callback
    from rollmill.trackers.run_views import RunView
    from rollmill.types import Experience

_CONFIG, _REPORT = "config.yaml", "report.html"
_reserved: WeakValueDictionary[str, TrainingRun] = WeakValueDictionary()


class TrainingRun:
    """A run of an algorithm, or of a whole run file.

    Args:
        model: a folder, an id of the Hugging Face hub, the section `model`, or a loaded transformers model.
        dataset: rows (mappings), a function that yields them, a `datasets.Dataset`, a path, or the section `taskset`.
        rewards: functions `(task, completion) -> number`, names of built-in rewards, or sections.
        tokenizer: of a loaded model.
        eval_dataset: held-out tasks, in the forms of `dataset`.
        config: a run file, or its contents as a dict, whose keys the other arguments override.
        out: the run directory. Default: runs/NAME, numbered if it is taken.
        callbacks: called between steps; see `rollmill.Callback`.
        settings: keys of a run file (`steps=100`, `trainer={...}`), of the algorithm (`kl=0.1`), and of the sections
            `trainer` (`lr=1e-5`) and `rollout` (`group_size=8`).

    Raises:
        ConfigError: the settings are wrong; the message lists every problem, as for a run file.
    """

    algorithm: ClassVar[str | None] = None  #: name of the algorithm; None: as `config` says

    def __init__(
        self,
        model: Any = None,
        dataset: Any = None,
        rewards: Any = None,
        *,
        tokenizer: Any = None,
        eval_dataset: Any = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        values = {} if config is None or isinstance(config, str | Path) else dict(config)
        name = str(settings.get("name", values.get("name", self.algorithm or _stem(config) or "run")))
        self.folder = _reserve(Path("runs") / name if out is None else Path(out), self, fixed=out is not None)
        inputs = RunInputs(self.folder / INPUTS)
        if self.algorithm is not None:
            values["algorithm"] = _merged({"name": self.algorithm}, _named(values.get("algorithm")))
        for key, value in _sorted_settings(self.algorithm, settings).items():
            values[key] = _merged(values[key], value) if key in values else value
        if dataset is not None:
            values["taskset"] = dataset
        if rewards is not None:
            values["rewards"] = rewards
        if eval_dataset is not None:
            values["evaluation"] = _merged(values.get("evaluation", {}), {"taskset": eval_dataset})
        model = values.pop("model", None) if model is None else model
        head: dict[str, Any] = {"include": os.path.abspath(config)} if isinstance(config, str | Path) else {}
        head |= {"name": name} if isinstance(config, str | Path) is False or "name" in settings else {}
        head |= {} if model is None else {"model": inputs.model(model, tokenizer)}
        self._text = write_yaml({**head, **inputs.section({key: values[key] for key in values if key != "name"})})
        file = self.folder / INPUTS / RUN_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, self._text.encode())
        self._loaded: LoadedRun | None = load_run(file, out=self.folder)
        self.callbacks: Sequence[Callback] = callbacks
        self.summary: dict[str, Any] = {}  #: the contents of summary.json, after the run

    @classmethod
    def open(cls, folder: str | Path, callbacks: Sequence[Callback] = ()) -> Self:
        """Open the directory of an earlier run, to resume it or to look at it. Raises ConfigError if it holds none."""
        run = cls.__new__(cls)
        run.folder, run._loaded = Path(folder).absolute(), None
        file = run.folder / _CONFIG
        if not file.is_file():
            raise ConfigError(f"{folder} holds no run (no {_CONFIG}); give a run directory")
        run.callbacks = callbacks
        run._text, run.summary = file.read_text(encoding="utf-8"), {}
        return run

    @property
    def loaded(self) -> LoadedRun:
        """The checked run file, with the sections of all stages."""
        if self._loaded is None:
            self._loaded = load_run(self.folder / _CONFIG, out=self.folder)
        return self._loaded

    @property
    def config(self) -> RunConfig:
        """The checked settings, with all defaults; stage sections are those of the first stage."""
        return self.loaded.config

    def to_yaml(self, path: str | Path | None = None) -> str:
        """Return the run file, and write it to `path` if given; `rollmill run` starts the same run from it."""
        if path is not None:
            atomic_write(Path(path), self._text.encode())
        return self._text

    # -- running -----------------------------------------------------------------------------------------------

    def train(self) -> Self:
        """Train from the first step.

        Raises:
            ConfigError: the run has been trained already; `resume` goes on with it.
            RollmillError: the run failed; the message says what to do.
            KeyboardInterrupt: the user interrupted it; a checkpoint is written, and `resume` goes on.
        """
        with quick_imports():
            from rollmill.launch import start

        def work(view: RunView, interrupts: Interrupts) -> dict[str, Any]:
            return start(self.loaded, self.folder, view, interrupts=interrupts, callbacks=self.callbacks)

        return self._run(work)

    def resume(self, **settings: Any) -> Self:
        """Go on from the newest checkpoint, as if the run had not stopped. Raises like `train`.

        Args:
            settings: to change before, as keyword arguments of the class: `steps=200` extends a finished run. Raises
                ConfigError for a setting that a run keeps.
        """
        with quick_imports():
            from rollmill.launch import resume
            from rollmill.orchestrator.extension import change_settings, iter_settings

        if settings:
            found = _sorted_settings(self.config.algorithm.name, settings)
            change_settings(self.folder, [f"{key}={json.dumps(value)}" for key, value in iter_settings(found)])
            self._loaded, self._text = None, (self.folder / _CONFIG).read_text(encoding="utf-8")

        def work(view: RunView, interrupts: Interrupts) -> dict[str, Any]:
            return resume(self.folder, view, interrupts=interrupts, callbacks=self.callbacks)

        return self._run(work)

    def _run(self, work: Callable[[RunView, Interrupts], dict[str, Any]]) -> Self:
        from rollmill.api.foreground import run_in_foreground

        if self.loaded.config.mode not in ("both", "train"):
            raise ConfigError(f"mode `{self.loaded.config.mode}` is for the command `rollmill run`")
        self.summary = run_in_foreground(work, self.loaded.config.monitor.show_completions)
        return self

    def evaluate(self, step: int | None = None, **settings: Any) -> dict[str, Any]:
        """Evaluate a checkpoint (default: the newest) by the run's evaluation; see `rollmill.evaluate`."""
        return evaluate(self, step, **settings)

    # -- results -----------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every step so far, as in metrics.jsonl."""
        from rollmill.trackers.metrics_log import read_metrics

        return read_metrics(self.folder)

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Changes that callbacks have made, for the setting `changes` of a run that repeats them."""
        from rollmill.orchestrator.run_control import CHANGES_FILE
        from rollmill.trackers.metrics_log import read_jsonl_rows

        return read_jsonl_rows(self.folder / CHANGES_FILE)

    @property
    def report(self) -> Path:
        """The HTML report. Raises ConfigError before there is one."""
        if not (self.folder / _REPORT).is_file():
            raise ConfigError(f"{self.folder} has no report yet; it is written when the run ends or is interrupted")
        return self.folder / _REPORT

    @property
    def model_path(self) -> Path:
        """The folder of the newest checkpoint, a transformers model. Raises ConfigError if there is none."""
        from rollmill.orchestrator.checkpoint import Checkpoints

        checkpoints = Checkpoints(self.folder)
        if not (steps := checkpoints.steps()):
            raise ConfigError(f"{self.folder} has no checkpoint yet; train first")
        return checkpoints.path(steps[-1])

    def experiences(self, step: int | None = None, task: str | None = None) -> list[Experience]:
        """The recorded rollouts, of one step or one task if given."""
        from rollmill.trackers.rollout_log import load_experiences

        return load_experiences(self.folder, step, task)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.folder}>"


def _reserve(folder: Path, run: TrainingRun, *, fixed: bool) -> Path:
    """Return the directory of a new run: if not `fixed`, one that no other run of this process or the disk has."""
    number, candidate = 1, folder.absolute()
    while not fixed and ((candidate / _CONFIG).exists() or str(candidate) in _reserved):
        number += 1
        candidate = folder.absolute().with_name(f"{folder.name}-{number}")
    _reserved[str(candidate)] = run
    return candidate


def _stem(config: object) -> str:
    return Path(config).stem if isinstance(config, str | Path) else ""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value or {}


def _merged(base: Any, top: Any) -> Any:
    """Return `top` over `base`: mappings merge, everything else replaces."""
    if not isinstance(base, Mapping) or not isinstance(top, Mapping):
        return top
    return {**base, **{key: _merged(base[key], value) if key in base else value for key, value in top.items()}}


def _sorted_settings(algorithm: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put each setting where the run file has it. Raises ConfigError for a name that no section has."""
    found: dict[str, Any] = {}
    homes = setting_homes(algorithm)
    for key, value in settings.items():
        if key not in homes:
            raise ConfigError(f"no setting `{key}`{did_you_mean(key, homes)}; see docs/run-file")
        place = {homes[key]: {key: value}} if homes[key] else {key: value}
        found = _merged(found, place)
    return found


def setting_homes(algorithm: str | None) -> dict[str, str]:
    """Return the settings of an algorithm's class, and the section that each is a key of; "" is the run file itself."""
    options = [] if algorithm is None else [key for key in known_algorithms()[algorithm].model_fields if key != "name"]
    sections: Sequence[tuple[str, Sequence[str]]] = (
        ("rollout", list(RolloutConfig.model_fields)),
        ("trainer", list(TrainerConfig.model_fields)),
        ("algorithm", options),
        ("", list(RunConfig.model_fields)),
    )
    return {key: section for section, keys in sections for key in keys}
