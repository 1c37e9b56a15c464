"""Starting, resuming and evaluating runs: from a run file to a master with everything it needs."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollmill.cluster.pool import ActorPool
from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.model import ModelConfig
from rollmill.config.placement import Inline, OnRay, PlacementConfig
from rollmill.config.resolve import STAGE_KEYS
from rollmill.config.rewards import RewardConfig
from rollmill.config.run import StageConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.config.workflows import Traffic
from rollmill.core.errors import CheckpointError, ConfigError, ModelError
from rollmill.core.types import Task
from rollmill.master.buffers import Buffers
from rollmill.master.checkpoint import Checkpoints, unreadable
from rollmill.master.context import RunContext
from rollmill.master.interrupt import Interrupted, Interrupts
from rollmill.master.master import Master, Serving
from rollmill.master.residents import plan_of
from rollmill.master.selection import StageTasks, select_tasks
from rollmill.master.stage import MakeStage, StageRun
from rollmill.master.state import RunState
from rollmill.master.summary import summarise
from rollmill.master.training import making_stages
from rollmill.models.classifier import require_classifier
from rollmill.models.load import Policy, load_policy
from rollmill.models.lora import ADAPTER, load_adapter
from rollmill.models.run_tokenizer import save_run_tokenizer
from rollmill.monitor.files import atomic_write
from rollmill.monitor.heartbeat import TRAINER, Heartbeat, beating
from rollmill.monitor.metrics import read_metrics
from rollmill.monitor.monitor import Monitor
from rollmill.monitor.view import View, make_view
from rollmill.recipes import RewardModel
from rollmill.rewards import Judge, build_judge
from rollmill.tasks import Taskset, load_taskset
from rollmill.trainer import choose_precision, choose_threads

CONFIG = "config.yaml"
NO_TASKS = Taskset("none", [], [])
MACHINE = "machine.json"


def run(
    source: str | Path, overrides: Sequence[str] = (), out: str | Path | None = None, view: View | None = None
) -> dict[str, Any]:
    """Run a run file and return the summary (the contents of summary.json).

    Args:
        source: the run file.
        overrides: `section.key=value` strings.
        out: the run directory; default runs/NAME, numbered if it exists.
        view: what shows the run; default the terminal.

    Raises:
        ConfigError: the run file is wrong, or `out` already holds a run.
        RollmillError: the run failed; the message says what to do.
        KeyboardInterrupt: the user interrupted the run; a checkpoint is written.
    """
    loaded = load_run(Path(source), overrides, None if out is None else Path(out))
    if loaded.config.mode not in ("both", "train"):
        raise ConfigError(f"{source}: mode `{loaded.config.mode}` is for the command `rollmill run`")
    return start(loaded, out, view)


def start(
    loaded: LoadedRun, out: str | Path | None, view: View | None, serving: Serving | None = None
) -> dict[str, Any]:
    """Run what was loaded, in a directory of its own; see `run`."""
    run_dir = _fresh(Path(out)) if out is not None else numbered(loaded.out)
    atomic_write(run_dir / CONFIG, loaded.to_yaml().encode())
    return execute(loaded, run_dir, view, resumed=False, serving=serving)


def resume(run_dir: str | Path, view: View | None = None, serving: Serving | None = None) -> dict[str, Any]:
    """Go on with an interrupted or killed run, from its newest checkpoint; see `run`."""
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run (no {CONFIG}); give the directory that `rollmill run` printed")
    return execute(load_run(folder / CONFIG, out=folder), folder, view, resumed=True, serving=serving)


def evaluate(run_dir: str | Path, step: int | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate a checkpoint of a run (default: the newest) as the run's last evaluated stage says.

    Returns step and the eval/ metrics. Raises ConfigError when no stage has an evaluation, CheckpointError when the
    step has no checkpoint.
    """
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run (no {CONFIG}); give a run directory")
    loaded = load_run(folder / CONFIG, out=folder)
    indices = [i for i, stage in enumerate(loaded.stages) if stage.evaluation is not None]
    if not indices:
        raise ConfigError(f"{folder / CONFIG} has no evaluation section; add evaluation.taskset to evaluate")
    loaded = load_run(folder / CONFIG, of_stage(loaded, indices[-1], overrides), out=folder)
    fixed = [key for key in overrides if key.partition("=")[0].rpartition(".")[2] in ("precision", "threads")]
    if fixed:
        raise ConfigError(f"--set {fixed[0]}: precision and threads are fixed for a run, and stored in its {MACHINE}")
    steps = Checkpoints(folder).steps()
    if not steps or (step is not None and step not in steps):
        have = ", ".join(map(str, steps)) or "none"
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"{folder} has no {what} to evaluate; it has: {have}")
    chosen = steps[-1] if step is None else step
    require_models(loaded.stages[indices[-1]])
    setup = set_up(loaded, folder, chosen)  # not in the event loop, so that Ctrl-C ends it at once
    return {"step": chosen, **asyncio.run(_evaluate(loaded, folder, setup, indices[-1], chosen))}


def require_models(stage: StageConfig) -> None:
    """Raises ConfigError where a stage that is only evaluated talks to the policy that it began with."""
    for name, model in stage.models.items():
        if model.policy is not None:
            text = f"models.{name}: the policy at the start of the stage is known only while the run trains; give"
            raise ConfigError(f"{text} --set models.{name}.policy=null and --set models.{name}.path=FOLDER")


def of_stage(loaded: LoadedRun, index: int, overrides: Sequence[str]) -> list[str]:
    """Overrides as keys of one stage, where the run has several."""
    if not loaded.config.stages:
        return list(overrides)
    return [f"stages.{index}.{each}" if re.split(r"[.=]", each)[0] in STAGE_KEYS else each for each in overrides]


async def _evaluate(loaded: LoadedRun, run_dir: Path, setup: Setup, index: int, step: int) -> dict[str, float]:
    stage = StageRun(
        loaded.stages[index],
        setup.policy,
        setup.tasks[index],
        setup.context(loaded, run_dir, Buffers(run_dir, setup.run_id, read_only=True), Inline()),
        index=index,
        first_version=step,
    )
    try:
        return (await stage.evaluate()).metrics
    finally:
        await stage.close()


def execute(
    loaded: LoadedRun,
    run_dir: Path,
    view: View | None,
    *,
    resumed: bool,
    serving: Serving | None = None,
    explorers: ActorPool | None = None,
    interrupts: Interrupts | None = None,
) -> dict[str, Any]:
    """Run what is left of a run and return the summary; see `run`.

    Args:
        explorers: those of a run on Ray, in the process that trains; without, that process is started.
        interrupts: what may be asked to end the run besides signals.
    """
    if isinstance(loaded.config.placement, OnRay) and explorers is None:
        from rollmill.master.supervisor import supervise  # which has this function called

        return supervise(loaded, run_dir, view, resumed=resumed)
    with (
        beating(run_dir, TRAINER) as heartbeat,
        making_stages(loaded.config, run_dir, resumed=resumed) as make_stage,
    ):
        given = _Given(heartbeat, make_stage, serving, explorers, interrupts)
        return _execute(loaded, run_dir, view, given, resumed=resumed)


@dataclass(frozen=True)
class _Given:
    """What a run gets from the process that it is in."""

    heartbeat: Heartbeat
    make_stage: MakeStage
    serving: Serving | None
    explorers: ActorPool | None
    interrupts: Interrupts | None


def _execute(loaded: LoadedRun, run_dir: Path, view: View | None, given: _Given, *, resumed: bool) -> dict[str, Any]:
    serving = given.serving
    if serving is None and any(isinstance(stage.workflow, Traffic) for stage in loaded.stages):
        raise ConfigError(
            f"{loaded.path}: workflow `traffic` waits for an application: start it by "
            f"`rollmill serve {run_dir if resumed else loaded.path} --train`"
        )
    checkpoints = Checkpoints(run_dir)
    steps = checkpoints.steps() if resumed else []
    start: tuple[RunState, dict[str, Any]] | None = None
    if steps:
        start = checkpoints.read(steps[-1])
    checkpoints.sweep()
    setup = set_up(loaded, run_dir, steps[-1] if steps else None)
    plan = [(stage.name, stage.steps) for stage in loaded.stages]
    view = view or make_view(loaded.config.monitor.show_completions)
    monitor = Monitor(run_dir, loaded.config.name, plan, loaded.config.monitor, view)
    buffers = Buffers(run_dir, setup.run_id, shared=loaded.config.is_split)
    shared = setup.context(loaded, run_dir, buffers, loaded.config.placement)
    context = replace(shared, explorers=given.explorers, heartbeat=given.heartbeat)
    master = Master(
        context,
        loaded.config,
        loaded.stages,
        setup.policy,
        setup.tasks,
        monitor,
        serving=serving,
        interrupts=given.interrupts,
        make_stage=given.make_stage,
    )
    try:
        buffers.open_all(loaded.stages)
        monitor.message(setup.describe(run_dir))
        if resumed:
            monitor.resume_at(steps[-1] if steps else 0)
        summary = asyncio.run(master.run(start))
    except Interrupted:
        again = f"resume {run_dir}" if serving is None else f"serve {run_dir} --train"
        summary = summarise(master.state, [stage.name for stage in loaded.stages], checkpoints, "interrupted")
        monitor.message(f"interrupted after step {master.state.step}; go on with: rollmill {again}")
        monitor.close(summary)
        raise KeyboardInterrupt from None
    except BaseException:
        monitor.close(None)
        raise
    finally:
        buffers.close()
    monitor.close(summary)
    return summary


def prepare(loaded: LoadedRun, folder: Path) -> tuple[Policy, list[StageTasks], RunContext]:
    """What the stages of a run are made of, in one process and without a run, for measurements; writes into `folder`
    what a run keeps of its machine. Raises like `run`.
    """
    setup = set_up(loaded, folder, None)
    buffers = Buffers(folder, setup.run_id, read_only=True)
    return setup.policy, setup.tasks, setup.context(loaded, folder, buffers, Inline())


@dataclass(frozen=True)
class Setup:
    policy: Policy
    tasks: list[StageTasks]
    precision: str
    threads: int
    run_id: str
    judges: list[Judge]  #: closed; they keep the reward models that the stages share in memory

    def context(self, loaded: LoadedRun, run_dir: Path, buffers: Buffers, placement: PlacementConfig) -> RunContext:
        """What the stages share."""
        config = loaded.config
        return RunContext(
            run_dir,
            self.run_id,
            config.seed,
            self.precision,
            self.threads,
            buffers,
            config.plugins,
            placement,
        )

    def describe(self, run_dir: Path) -> str:
        count = sum(parameter.numel() for parameter in self.policy.model.parameters())
        return (
            f"{type(self.policy.model).__name__}, {count / 1e6:.2f}M parameters, {self.precision} on "
            f"{self.policy.device} with {self.threads} thread(s); run directory {run_dir}"
        )


def set_up(loaded: LoadedRun, run_dir: Path, step: int | None, *, joined: bool = False) -> Setup:
    """Data, model and machine settings; the model is the checkpoint's where there is one.

    Args:
        joined: another process of the run has written what is the run's own.
    """
    config = loaded.config
    torch.manual_seed(config.seed)
    torch.set_num_threads(1 if config.threads == "auto" else config.threads)
    device = device_of(config.device)
    # what is missing in the last stage's rewards shows before the first has run
    wanted = [(rewards, stage.judging) for stage in loaded.stages for rewards in _rewards(stage)]
    judges = [build_judge(rewards, judging, device=str(device)) for rewards, judging in wanted]
    for judge in judges:
        judge.close()
    tasksets = _load_tasksets(loaded.stages)
    adapted = config.model.lora is not None
    model = config.model if step is None or adapted else ModelConfig(path=Checkpoints(run_dir).path(step))
    training = [tasksets[_key(stage.taskset)] for stage in loaded.stages if stage.taskset is not None]
    try:
        policy = load_policy(model, texts=lambda: _texts(training), seed=config.seed, device=device)
        if step is not None and adapted:
            load_adapter(policy.model, Checkpoints(run_dir).path(step) / ADAPTER)
    except ModelError as error:
        if step is None:
            raise
        raise unreadable(Checkpoints(run_dir).path(step), error) from error
    if any(isinstance(stage.algorithm, RewardModel) for stage in loaded.stages):
        require_classifier(policy.model)
    tasks = [_select(stage, policy, tasksets) for stage in loaded.stages]
    machine = _machine(run_dir, loaded, policy)
    if joined and config.threads != "auto":
        machine["threads"] = config.threads
    torch.set_num_threads(machine["threads"])
    for stage in loaded.stages:
        if stage.residency is not None:
            plan_of(stage, policy, machine["precision"])  # what does not fit shows before the first stage has run
    if not joined:
        save_run_tokenizer(run_dir, policy.tokenizer, policy.end_id)
    return Setup(policy, tasks, machine["precision"], machine["threads"], machine["run_id"], judges)


def _rewards(stage: StageConfig) -> list[list[RewardConfig]]:
    """The rewards of a stage, and those that sets of held-out tasks have of their own."""
    sets = [] if stage.evaluation is None else stage.evaluation.all_sets().values()
    return [stage.rewards, *(each.rewards for each in sets if each.rewards is not None)]


def _select(stage: StageConfig, policy: Policy, tasksets: dict[str, Taskset]) -> StageTasks:
    sets = {} if stage.evaluation is None else stage.evaluation.all_sets()
    held_out = {name: tasksets[_key(each.taskset)] for name, each in sets.items()}
    training = NO_TASKS if stage.taskset is None else tasksets[_key(stage.taskset)]
    return select_tasks(stage, policy, training, held_out)


def _machine(run_dir: Path, loaded: LoadedRun, policy: Policy) -> dict[str, Any]:
    """Thread count and precision, measured once per run and stored, so that a resumed run computes the same; and what
    a database knows the run by.
    """
    path = run_dir / MACHINE
    if path.is_file():
        stored: dict[str, Any] = json.loads(path.read_text())
        if "run_id" not in stored:  # an older version made the run
            stored["run_id"] = uuid.uuid4().hex
            atomic_write(path, (json.dumps(stored) + "\n").encode())
        return stored
    wanted = {stage.trainer.precision for stage in loaded.stages}
    if len(wanted) > 1:
        raise ConfigError(f"trainer.precision must be the same in all stages, found {', '.join(sorted(wanted))}")
    threads = loaded.config.threads
    chosen = choose_threads(policy.model) if threads == "auto" else threads
    torch.set_num_threads(chosen)
    precision = wanted.pop()
    if precision == "auto":
        precision = choose_precision(policy.model, policy.device)
    machine = {"threads": chosen, "precision": precision, "run_id": uuid.uuid4().hex}
    atomic_write(path, (json.dumps(machine) + "\n").encode())
    return machine


def _load_tasksets(stages: list[StageConfig]) -> dict[str, Taskset]:
    loaded: dict[str, Taskset] = {}
    for stage in stages:
        for config in (stage.taskset, *(stage.evaluation.tasksets() if stage.evaluation else [])):
            if config is not None and _key(config) not in loaded:
                loaded[_key(config)] = load_taskset(config)
    return loaded


def _key(config: TasksetConfig) -> str:
    return config.model_dump_json()


def _texts(tasksets: list[Taskset]) -> Iterator[str]:
    """All text of the training tasks: what a new tokenizer is trained on."""
    for taskset in tasksets:
        for task in taskset.tasks:
            yield from _task_texts(task)


def _task_texts(task: Task) -> Iterator[str]:
    if isinstance(task.prompt, str):
        yield task.prompt
    else:
        yield from (message["content"] for message in task.prompt)
    if task.response is not None:
        yield task.response
    if task.answer is not None:
        yield str(task.answer)


def device_of(wanted: str) -> torch.device:
    """The device of the key `device`. Raises ConfigError where there is none."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but torch finds no CUDA device; use device: auto or cpu")
    return torch.device(wanted)


def _fresh(folder: Path) -> Path:
    """A run that failed before its first result may be started again in the same directory, with another run file."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another folder with --out")
    if (folder / CONFIG).exists() and (read_metrics(folder) or Checkpoints(folder).steps()):
        raise ConfigError(
            f"{folder} already holds a run; go on with it by `rollmill resume {folder}`, or choose another --out"
        )
    (folder / MACHINE).unlink(missing_ok=True)
    return folder


def numbered(folder: Path) -> Path:
    """The folder, or the first of FOLDER-2, FOLDER-3 ... that holds no run."""
    number, candidate = 1, folder
    while (candidate / CONFIG).exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
