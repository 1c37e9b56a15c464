"""Sets up a run before its first step: data, model, and machine settings measured once."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollmill.config.checks.conflicts import require_workflows
from rollmill.config.checks.offload import engines_on_device
from rollmill.config.describe import evaluation_key
from rollmill.config.loader import LoadedRun
from rollmill.config.model import ModelConfig
from rollmill.config.placement import RayPlacement
from rollmill.config.resolve import STAGE_KEYS
from rollmill.config.rewards import Reward, RewardManagerConfig
from rollmill.config.run import StageConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.data import Taskset, load_taskset
from rollmill.data.images import PICTURES_FOLDER
from rollmill.errors import ConfigError, CorruptFileError, ModelError
from rollmill.files import atomic_write, read_json_object
from rollmill.models.classifier import require_classifier_support
from rollmill.models.cpu.host_memory import keep_freed_blocks, return_large_blocks
from rollmill.models.cpu.step_timing import CPU_ROW, StepSize, choose_precision, choose_threads
from rollmill.models.load import PolicyModel
from rollmill.models.lora import ADAPTER_FOLDER, load_adapter
from rollmill.models.quantization import count_weights
from rollmill.models.recurrent import recurrent_layers
from rollmill.models.run_tokenizer import save_run_tokenizer, use_run_date
from rollmill.models.vision import picture_processor
from rollmill.orchestrator.buffers import Buffers
from rollmill.orchestrator.checkpoint import Checkpoints, unreadable
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.engine import replays_routing
from rollmill.orchestrator.manifest import model_files, verifying
from rollmill.orchestrator.memory_choice import settle_run
from rollmill.orchestrator.offload import build_offload_plan
from rollmill.orchestrator.task_selection import StageTasks, select_tasks
from rollmill.rewards import RewardManager, build_reward_manager
from rollmill.rewards.references import require_references, require_verdicts
from rollmill.rewards.resources import close_warm_pools
from rollmill.trainer.parity import load_verified_policy
from rollmill.types import Task

NO_TASKS = Taskset("none", [], [])
MACHINE = "machine.json"


def prepare_first_stage(loaded: LoadedRun, folder: Path) -> tuple[RunSetup, RunContext]:
    """Set up a run's stages for measurements, in one process and without a run. Raises like `run`.

    The machine settings are written into `folder`.
    """
    setup = set_up_run(loaded, folder, None)
    if picture_processor(setup.policy.model) is not None:
        raise ConfigError("model.path: measurements of a vision-language model are not supported; use `rollmill run`")
    buffers = Buffers(folder, setup.run_id, read_only=True)
    return setup, setup.context(folder, buffers)


_LARGE_MODEL = 1 << 29
"""Bytes of weights on disk from which freed memory matters more than the time to get it again."""


@dataclass(frozen=True)
class RunSetup:
    """Policy, tasks and machine settings of a run."""

    loaded: LoadedRun  #: with plain values in place of those that the run has chosen (memory_choice.py)
    policy: PolicyModel
    tasks: list[StageTasks]
    precision: str
    threads: int
    run_id: str
    judges: list[RewardManager]  #: closed; keep the stages' shared reward models in memory
    messages: list[str]  #: on what was chosen, for the user

    def context(self, run_dir: Path, buffers: Buffers) -> RunContext:
        """Build the context that the stages share."""
        config = self.loaded.config
        return RunContext(
            run_dir,
            self.run_id,
            config.seed,
            self.precision,
            self.threads,
            buffers,
            config.plugins,
            engines=engines_on_device(config),
        )

    def describe(self, run_dir: Path) -> str:
        """One line on model, precision, device and run directory."""
        count = count_weights(self.policy.model)
        return (
            f"{type(self.policy.model).__name__}, {count / 1e6:.2f}M parameters, {self.precision} on "
            f"{self.policy.device} with {self.threads} thread(s); run directory {run_dir}"
        )


def set_up_run(
    loaded: LoadedRun, run_dir: Path, step: int | None, *, joined: bool = False, trains: bool = True
) -> RunSetup:
    """Load data, model and machine settings; the model is the checkpoint's, if there is one.

    Args:
        step: of the run's checkpoint; call it inside `verifying`, which finds damage.
        joined: another process of the run writes the run's own files.
        trains: this process does; False: it only generates.
    """
    try:
        return _set_up(loaded, run_dir, step, joined=joined, trains=trains)
    except BaseException:
        close_warm_pools()
        raise


def _set_up(loaded: LoadedRun, run_dir: Path, step: int | None, *, joined: bool, trains: bool) -> RunSetup:
    config = loaded.config
    torch.manual_seed(config.seed)
    torch.set_num_threads(1 if config.threads == "auto" else config.threads)
    device = choose_device(config.device)
    loaded, chosen, messages = settle_run(loaded, device, _stored_settings(run_dir), trains=trains)
    # errors in the last stage's rewards show before the first stage runs
    wanted = [(number, each) for number, stage in enumerate(loaded.stages) for each in _rewards(stage)]
    judges = [build_reward_manager(rewards, settings, device=str(device)) for _, (rewards, settings) in wanted]
    scores = joined or (config.mode == "both" and not isinstance(config.placement, RayPlacement))
    for (number, _), judge in zip(wanted, judges, strict=True):
        if scores and number == 0:
            judge.keep_warm()  # its processes start while the model is loaded
        else:
            judge.close()
    tasksets = _load_tasksets(loaded.stages)
    adapted = config.model.lora is not None
    stored = None if step is None else Checkpoints(run_dir).path(step)
    model = config.model if stored is None or adapted else ModelConfig(path=stored)
    training = [tasksets[_key(stage.taskset)] for stage in loaded.stages if stage.taskset is not None]
    dtype = torch.bfloat16 if _param_dtype(loaded) == "bf16" else torch.float32
    if any(stage.trainer.saves_memory for stage in loaded.stages) or _file_bytes(model) > _LARGE_MODEL:
        return_large_blocks()
    else:
        keep_freed_blocks()
    verified: AbstractContextManager[None] = nullcontext()  # by the caller, with the checkpoint's other files
    if stored is None and isinstance(model.path, Path):
        verified = verifying(model.path, model_files)
    # where ranks hold parts of the weights, these leave host memory part by part
    shards = not joined and any(stage.trainer.shards_weights for stage in loaded.stages)
    where = torch.device("cpu") if shards else device
    parted = shards and all(stage.trainer.shards_weights for stage in loaded.stages)
    with verified:
        try:
            policy = load_verified_policy(
                model,
                texts=lambda: _texts(training),
                seed=config.seed,
                device=where,
                pictures=True,
                dtype=dtype,
                stays_in_files=parted,
            )
            policy = replace(policy, device=device)
            if stored is not None and adapted:
                load_adapter(policy.model, stored / ADAPTER_FOLDER)
        except ModelError as error:
            if stored is None:
                raise
            raise unreadable(stored, error) from error
    use_run_date(run_dir, policy.tokenizer)
    if (processor := picture_processor(policy.model)) is not None:
        processor.folder = run_dir / PICTURES_FOLDER
    if any(not stage.algorithm.trains_policy for stage in loaded.stages):
        require_classifier_support(policy.model)
    for stage in loaded.stages:
        if recurrent_layers(policy.model):
            _refuse_drafts(stage, type(policy.model).__name__)
        replays_routing(stage, policy.model)  # raises if routing cannot be replayed
    tasks = [_select(stage, policy, tasksets) for stage in loaded.stages]
    machine = _machine_settings(run_dir, loaded, policy, None if joined else chosen)
    if joined and config.threads != "auto":
        machine["threads"] = config.threads
    torch.set_num_threads(machine["threads"])
    engines = engines_on_device(config)
    for stage in loaded.stages:
        if stage.offload is not None and not joined:
            build_offload_plan(stage, policy, machine["precision"], engines)  # a plan that does not fit fails here
    if not joined:
        save_run_tokenizer(run_dir, policy.tokenizer, policy.end_id)
    precision, threads, run_id = machine["precision"], machine["threads"], machine["run_id"]
    return RunSetup(loaded, policy, tasks, precision, threads, run_id, judges, messages)


def _file_bytes(model: ModelConfig) -> int:
    """Size of a checkpoint's weights on disk; 0 for a new model."""
    if not isinstance(model.path, Path):
        return 0
    files = [model.path] if model.path.is_file() else [*model.path.glob("*.safetensors"), *model.path.glob("*.bin")]
    return sum(file.stat().st_size for file in files)


def _param_dtype(loaded: LoadedRun) -> str:
    """The type of the weights. Raises ConfigError if the stages disagree: they train one model after the other."""
    wanted = {stage.trainer.param_dtype for stage in loaded.stages}
    if len(wanted) > 1:
        raise ConfigError("trainer.param_dtype must be the same in all stages, found bf16, fp32")
    return wanted.pop()


def _refuse_drafts(stage: StageConfig, model: str) -> None:
    """Raise ConfigError if a stage uses drafts: the state of recurrent layers cannot be cut back."""
    rollouts = {"rollout": stage.rollout}
    for name, each in ({} if stage.evaluation is None else stage.evaluation.all_sets()).items():
        rollouts[evaluation_key(name)] = stage.for_evaluation(each).rollout
    for place, rollout in rollouts.items():
        keys = [key for key in ("reuse", "ngram_draft") if getattr(rollout, key) is not None]
        if keys:
            raise ConfigError(
                f"stage {stage.name}: {place}: {keys[0]} does not work with {model}, which has recurrent layers: their "
                "state cannot go back to before a draft that is rejected; remove this key"
            )


def _rewards(stage: StageConfig) -> list[tuple[list[Reward], RewardManagerConfig]]:
    """The rewards of the stage's domains, and those of held-out sets with other rewards, with their limits."""
    sets = [] if stage.evaluation is None else stage.evaluation.all_sets().values()
    own = [stage.for_evaluation(each) for each in sets if each.rewards is not None]
    return [(view.rewards, view.reward_settings) for view in (*stage.by_domain().values(), *own)]


def _select(stage: StageConfig, policy: PolicyModel, tasksets: dict[str, Taskset]) -> StageTasks:
    sets = {} if stage.evaluation is None else stage.evaluation.all_sets()
    held_out = {name: tasksets[_key(each.taskset)] for name, each in sets.items()}
    training = NO_TASKS if stage.taskset is None else tasksets[_key(stage.taskset)]
    for name, view in stage.by_domain().items():
        own = [task for task in training.tasks if task.taskset == name] if name else training.tasks
        section = f"domains.{name}.taskset" if name else "taskset"
        require_references(view.rewards, own, f"stage {stage.name}: {section}")
        require_verdicts(view.rewards, view.reward_settings, own, f"stage {stage.name}: {section}")
        require_workflows(view, own, f"stage {stage.name}: {section}")
    for name, each in sets.items():
        view, where = stage.for_evaluation(each), f"stage {stage.name}: {evaluation_key(name)}"
        require_references(view.rewards, held_out[name].tasks, where)
        require_verdicts(view.rewards, view.reward_settings, held_out[name].tasks, where)
        require_workflows(view, held_out[name].tasks, where)
    return select_tasks(stage, policy, training, held_out)


def _machine_settings(
    run_dir: Path, loaded: LoadedRun, policy: PolicyModel, chosen: dict[str, Any] | None
) -> dict[str, Any]:
    """Thread count, precision, run id and, on a GPU, what decides on memory: chosen once per run and stored, so that a
    resumed run computes the same.

    Args:
        chosen: what to store of the choice of this start, see `settle_run`.
    """
    if (stored := _stored_settings(run_dir)) is not None:
        if chosen is not None:  # the run goes on on another GPU
            stored = stored | {"memory": chosen}
            store_machine(run_dir, stored)
        return stored
    wanted = {stage.trainer.precision for stage in loaded.stages}
    if len(wanted) > 1:
        raise ConfigError(f"trainer.precision must be the same in all stages, found {', '.join(sorted(wanted))}")
    threads = loaded.config.threads
    size = _step_size(loaded.stages[-1])
    count = choose_threads(policy.model, size) if threads == "auto" else threads
    torch.set_num_threads(count)
    precision = wanted.pop()
    if precision == "auto" and _param_dtype(loaded) == "bf16":
        precision = "bf16"
    if precision == "auto":
        precision = choose_precision(policy.model, policy.device, size)
    machine: dict[str, Any] = {"threads": count, "precision": precision, "run_id": uuid.uuid4().hex}
    if chosen is not None:
        machine["memory"] = chosen
    store_machine(run_dir, machine)
    return machine


def _step_size(stage: StageConfig) -> StepSize:
    """Rows that the stage's step passes through the model. Prompts, whose lengths vary, are not counted."""
    rollout, row = stage.rollout, min(CPU_ROW, stage.trainer.micro_batch_tokens)
    if not stage.algorithm.uses_rollouts:
        return StepSize.of_training(stage.trainer.micro_batch_tokens)
    completions = rollout.batch * rollout.group_size
    sequences = min(completions, rollout.max_sequences)
    rows = completions * rollout.max_new_tokens
    return StepSize(sequences, decoded=rows // sequences, learned=rows, row=row)


def _stored_settings(run_dir: Path) -> dict[str, Any] | None:
    """The settings of a run that has begun; None for a new one. A file that is lost or damaged is made again from the
    newest checkpoint that has a manifest. Raises CorruptFileError if none has."""
    path, checkpoints, damage = run_dir / MACHINE, Checkpoints(run_dir), "missing"
    if path.is_file():
        try:
            stored = read_json_object(path)
            missing = [key for key in ("threads", "precision", "run_id") if key not in stored]
            if not missing:
                return stored
            damage = f"damaged (it has no {missing[0]})"
        except CorruptFileError:
            damage = "damaged (it holds no JSON object)"
    elif not checkpoints.steps():
        return None
    if (found := checkpoints.machine()) is None:
        raise CorruptFileError(
            f"{path} is {damage}, and no checkpoint of the run says what was in it: thread count, precision and the "
            "run's id. So put the file back, or start a new run."
        )
    store_machine(run_dir, found)
    return found


def store_machine(run_dir: Path, machine: dict[str, Any]) -> None:
    atomic_write(run_dir / MACHINE, (json.dumps(machine) + "\n").encode(), durable=True)


def read_machine(run_dir: Path) -> dict[str, Any]:
    """The run's machine settings; {} if their file is missing or damaged, which a trainer mends when it resumes the
    run."""
    try:
        return read_json_object(run_dir / MACHINE)
    except (OSError, CorruptFileError):
        return {}


def read_run_id(run_dir: Path) -> str | None:
    """The run's id; None if it is not known, see `read_machine`."""
    found = read_machine(run_dir).get("run_id")
    return None if found is None else str(found)


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
    """All text of the training tasks, to train a new tokenizer on."""
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


def choose_device(wanted: str) -> torch.device:
    """The device of the key `device`. Raises ConfigError if it is not available."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but torch finds no CUDA device; use device: auto or cpu")
    return torch.device(wanted)


def require_models(stage: StageConfig) -> None:
    """Raise ConfigError if a stage that is only evaluated uses earlier weights of the policy as a model."""
    for name, model in stage.all_models.items():
        if model.policy is not None:
            text = f"models.{name}: earlier weights of the policy are known only while the run trains; give"
            raise ConfigError(f"{text} --set models.{name}.policy=null and --set models.{name}.path=FOLDER")


def stage_overrides(loaded: LoadedRun, index: int, overrides: Sequence[str]) -> list[str]:
    """Prefix overrides with the stage's index, if the run has several stages."""
    if not loaded.config.stages:
        return list(overrides)
    return [f"stages.{index}.{each}" if re.split(r"[.=]", each)[0] in STAGE_KEYS else each for each in overrides]
