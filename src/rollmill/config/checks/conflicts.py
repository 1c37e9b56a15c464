"""Conflicting choices, found before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.algorithms.base import AlgorithmOptions, OfflineAlgorithmOptions, PolicyGradientOptions
from rollmill.config.algorithms.baselines import BatchBaseline, PassAtKAdvantage
from rollmill.config.algorithms.distillation import DistillationOptions, SelfDistill
from rollmill.config.checks.domains import domain_conflicts
from rollmill.config.checks.engine import engine_conflicts
from rollmill.config.checks.evaluation import evaluation_conflicts, evaluation_set_path
from rollmill.config.checks.rewards import reward_conflicts
from rollmill.config.checks.workflow import workflow_conflicts
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.model import ModelConfig, NewModelConfig
from rollmill.config.run import StageConfig
from rollmill.config.taskset import RowsSection, TasksetConfig, TasksetSection
from rollmill.config.tree import KeyPath, format_key_path
from rollmill.errors import ConfigError
from rollmill.types import Task

Conflict = tuple[KeyPath, str]

_FILE_SUFFIXES = {".jsonl", ".json", ".parquet", ".csv"}


def find_conflicts(stage: StageConfig) -> Iterator[Conflict]:
    """Yields key paths within the stage, each with the problem and a remedy."""
    if stage.domains:
        yield from domain_conflicts(stage, _find_conflicts)
    else:
        yield from _find_conflicts(stage)


def require_workflows(stage: StageConfig, tasks: Sequence[Task], where: str) -> None:
    """Raise ConfigError if a task names a workflow that cannot run in its stage.

    Args:
        stage: the stage as the domain or the evaluation set of the tasks sees it.
        where: the section of the run file that they come from, for the message.
    """
    first = {task.workflow: task for task in reversed(tasks) if task.workflow is not None}
    known = set(_find_conflicts(stage)) if first else set()
    for name, task in first.items():
        for path, text in _find_conflicts(stage.of_row(name)):
            if (path, text) not in known:
                raise ConfigError(
                    f"{where}: task `{task.id}` names the workflow `{name}` (taskset.fields.workflow), which cannot "
                    f"run in this stage: {format_key_path(path)}: {text}"
                )


def _find_conflicts(stage: StageConfig) -> Iterator[Conflict]:
    yield from _rollouts(stage)
    yield from engine_conflicts(stage)
    yield from workflow_conflicts(stage)
    yield from reward_conflicts(stage)
    yield from _buffer(stage)
    yield from _training(stage)
    yield from evaluation_conflicts(stage)
    yield from _tasksets(stage)


def _rollouts(stage: StageConfig) -> Iterator[Conflict]:
    algorithm, rollout = stage.algorithm, stage.rollout
    if not algorithm.uses_rollouts:
        return
    if rollout.temperature == 0:
        text = "training needs differing completions, but 0 always picks the same; give a value above 0, usually 1"
        yield ("rollout", "temperature"), text
    yield from _truncated_rollouts(stage)
    if isinstance(algorithm, DistillationOptions):
        if isinstance(algorithm, SelfDistill):
            yield from _self_distillation(stage, algorithm)
        plain = (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p) == (1.0, 1.0, 0, 0.0)
        if algorithm.divergence in ("sampled", "sampled_jsd") and not plain:
            text = "needs tokens of the policy's own distribution: temperature 1 and no truncation"
            advice = "change rollout, or use reverse_kl or jsd"
            yield ("algorithm", "divergence"), f"`{algorithm.divergence}` {text}; {advice}"
        return
    assert isinstance(algorithm, PolicyGradientOptions)
    advantage = algorithm.advantage
    if isinstance(advantage, BatchBaseline):
        if advantage.baseline == "batch" and rollout.batch * rollout.group_size == 1:
            yield ("rollout", "batch"), "one completion per step equals its own baseline; raise batch or group_size"
    elif rollout.group_size == 1 and advantage.compares_groups:
        text = f"advantage `{advantage.name}` compares completions of a group, and 1 leaves nothing to compare"
        yield ("rollout", "group_size"), f"{text}; give at least 2, or use algorithm `reinforce`"
    elif isinstance(advantage, PassAtKAdvantage):
        least = advantage.k + (advantage.baseline == "mean")
        if rollout.group_size < least:
            text = f"pass@{advantage.k} over subsets of a group needs at least {least} completions, not"
            yield ("algorithm", "advantage", "k"), f"{text} {rollout.group_size}; lower k, or raise rollout.group_size"
    if algorithm.overlong_buffer >= rollout.max_new_tokens:
        text = f"must be below rollout.max_new_tokens ({rollout.max_new_tokens}); lower one or raise the other"
        yield ("algorithm", "overlong_buffer"), text


def _self_distillation(stage: StageConfig, algorithm: SelfDistill) -> Iterator[Conflict]:
    """Checks what a teacher with another prompt needs."""
    if not (stage.workflow.single_turn and stage.workflow.uses_tasks):
        text = "the teacher reads the task's prompt with more context in place of what the policy saw"
        yield ("workflow",), f"algorithm `self_distill` needs workflow `single_turn`: {text}"
    if algorithm.context != "success":
        return
    if not stage.rewards:
        text = "context `success` needs rewards, which say what succeeded; add them"
        yield ("algorithm", "context"), f"{text}, or use `solution` or `answer`"
    if stage.rollout.group_size == 1:
        text = "context `success` is another completion of the group, and 1 leaves none; give at least 2"
        yield ("rollout", "group_size"), text


def _truncated_rollouts(stage: StageConfig) -> Iterator[Conflict]:
    """Checks options that suspend or cancel unfinished completions."""
    rollout, budget = stage.rollout, ("rollout", "token_budget")
    if rollout.token_budget is not None:
        if stage.max_staleness == 0:
            text = "a completion that goes on in the next step is a version old then; set max_staleness to 1 or more"
            yield budget, text
        if not stage.workflow.single_turn:
            text = f"workflow `{stage.workflow.name}` cannot be put away in the middle; use rollout.oversample"
            yield budget, f"{text}, or rollout.time_limit_s"
    name = "token_budget" if rollout.token_budget is not None else "oversample"
    advantage = getattr(stage.algorithm, "advantage", None)
    if (rollout.token_budget is not None or rollout.oversample) and advantage is not None and advantage.uses_greedy:
        text = f"advantage `{advantage.name}` needs a greedy completion of every task, which is not cut short"
        yield ("rollout", name), f"{text}; remove this, or use another algorithm"


def _buffer(stage: StageConfig) -> Iterator[Conflict]:
    age = stage.buffer.max_age
    if age is not None and age < stage.max_staleness:
        text = f"groups may be {stage.max_staleness} versions old (max_staleness), and all older than {age} are dropped"
        yield ("buffer", "max_age"), f"{text}; raise it, or lower max_staleness"


def buffer_conflicts(stages: Sequence[StageConfig]) -> Iterator[Conflict]:
    """Yields key paths of the run for stages whose buffers would miss groups of the run."""
    database: int | None = None
    for index, stage in enumerate(stages):
        at = ("stages", index, "buffer") if len(stages) > 1 else ("buffer",)
        if not stage.algorithm.uses_rollouts:
            continue
        if not stage.buffer.in_database(stage.persistent):
            operators = [operator for view in stage.by_domain().values() for operator in view.pipeline]
            made = [operator.name for operator in operators if operator.creates_experiences]
            if made and any(later.buffer.in_database(later.persistent) for later in stages[index + 1 :]):
                text = f"what `{made[0]}` makes would stay out of reach of later stages, whose buffer is a database"
                yield (*at, "store"), f"{text}; use `sql` here, too"
            continue
        first = stages[index if database is None else database]
        if first.buffer.url != stage.buffer.url:
            text = "a run has one database, and an earlier stage has another one: feedback would miss one of them"
            yield (*at, "url"), f"{text}; write `buffer.url` once, for the whole file"
        database = index if database is None else database


def _training(stage: StageConfig) -> Iterator[Conflict]:
    algorithm, trainer = stage.algorithm, stage.trainer
    key, batch = "rollout.batch", stage.rollout.batch
    if isinstance(algorithm, OfflineAlgorithmOptions):
        key, batch = "algorithm.batch", algorithm.batch
    if trainer.updates_per_batch > batch:
        text = f"{trainer.updates_per_batch} updates cannot share {batch} groups; lower it, or raise {key} ({batch})"
        yield ("trainer", "updates_per_batch"), text
    if trainer.warmup_steps > stage.steps:
        text = f"{trainer.warmup_steps} is longer than the stage ({stage.steps} steps); lower it or raise steps"
        yield ("trainer", "warmup_steps"), text
    if trainer.ranks > 1 and trainer.sharding == "context" and not algorithm.trains_policy:
        text = f"algorithm `{algorithm.name}` cannot share the tokens of a row yet; use `none`"
        yield ("trainer", "sharding"), text
    if trainer.shards_weights:
        yield from _sharding(algorithm)
    critic = algorithm.active_critic is not None
    if trainer.param_dtype == "bf16" and (critic or not algorithm.trains_policy):
        what = "a critic" if critic else f"algorithm `{algorithm.name}`"
        yield ("trainer", "param_dtype"), f"{what} is trained in fp32 and shares the policy's weights; remove it"


def _sharding(algorithm: AlgorithmOptions) -> Iterator[Conflict]:
    """Checks what cannot be sharded yet."""
    if not algorithm.trains_policy or isinstance(algorithm, SelfDistill):
        yield ("trainer", "sharding"), f"algorithm `{algorithm.name}` cannot be sharded yet; use `none`"
    if algorithm.active_critic is not None and algorithm.active_critic.network == "policy":
        text = "a head on the policy's network cannot be trained beside shards yet; use `own`, or sharding `none`"
        yield ("algorithm", "critic", "network"), text


def _tasksets(stage: StageConfig) -> Iterator[Conflict]:
    evaluation = stage.evaluation
    tasksets: dict[KeyPath, TasksetConfig] = {}
    if stage.taskset is not None:
        tasksets["taskset",] = stage.taskset
    elif stage.needs_taskset:
        yield ("taskset",), "is required; add it"
    for name, each in (evaluation.all_sets() if evaluation is not None else {}).items():
        tasksets[*evaluation_set_path(name), "taskset"] = each.taskset
        if each.taskset.mix and each.limit is not None:
            text = "the first tasks of a mix are those of its first set; give a limit to each entry of its mix instead"
            yield (*evaluation_set_path(name), "limit"), text
    for at, taskset in tasksets.items():
        for place, section in _sections(taskset, at):
            for index, operator in enumerate(section.pipeline):
                if operator.lacks_held_out:
                    text = "held-out tasks would be compared with nothing; put it into taskset.pipeline"
                    if at == ("taskset",):
                        text = "what is held out? Give `against`, or an evaluation"
                    yield (*place, "pipeline", index), text
            if at == ("taskset",):
                yield from _useless_sort(taskset, section, place)
            if section.sources() != ["mix"]:
                yield from _rows(section, place)


def _useless_sort(taskset: TasksetConfig, section: TasksetSection, at: KeyPath) -> Iterator[Conflict]:
    """Reports a `sort` without effect: neither the sampler nor a later operator depends on the sequence of tasks."""
    samplers = [part.sampler for part in (taskset.parts() if section is taskset else [section])]
    if any(sampler.sees_sequence for sampler in samplers):
        return
    for index, operator in enumerate(section.pipeline):
        behind = section.pipeline[index + 1 :]
        if operator.sorts and not any(each.keeps_first or type(each).function is not None for each in behind):
            text = (
                f"sampler `{samplers[0].name}` takes no notice of how the tasks are sorted; give sampler: sequential or"
            )
            yield (*at, "pipeline", index), f"{text} easy_to_hard, or remove this"


def _sections(taskset: TasksetConfig, at: KeyPath) -> list[tuple[KeyPath, TasksetSection]]:
    """Returns a taskset and its entries, with their key paths."""
    return [(at, taskset), *(((*at, "mix", index), entry) for index, entry in enumerate(taskset.mix))]


def _rows(taskset: RowsSection, at: KeyPath) -> Iterator[Conflict]:
    path = taskset.path
    if taskset.split is not None and path is not None and (path.is_file() or path.suffix in _FILE_SUFFIXES):
        yield (*at, "split"), f"only a folder written by `datasets` has splits, and {path} is a file; remove it"
    if taskset.preset is not None and taskset.generator is not None:
        yield (*at, "preset"), "a generator makes rows in its own layout; presets are honoured with path and function"
    if taskset.preset is not None and taskset.harbor is not None:
        yield (*at, "preset"), "task folders have a layout of their own; presets are honoured with path and function"
    if taskset.function is not None and ":" not in taskset.function:
        yield (*at, "function"), f"`{taskset.function}` names no function; write FILE.py:NAME or package.module:NAME"


def model_conflicts(model: ModelConfig, stages: list[StageConfig]) -> Iterator[Conflict]:
    """Yields conflicts of `model`; `model.new` beside a checkpoint folder is ignored."""
    if model.path == "new" and model.new is None:
        text = (
            "which model? Give model.path (a checkpoint folder) or model.new (a recipe, for example {hidden_size: 256})"
        )
        yield ("model",), text
    elif model.path == "new" and not any(stage.taskset or stage.needs_taskset for stage in stages):
        text = "a new model's tokenizer is trained on the taskset, and there is none; give model.path or a taskset"
        yield ("model", "new"), text
    elif model.path == "new" and model.new is not None:
        yield from _new_model(model.new, stages)
    yield from _other_models(model, stages)
    yield from _sharded_adapters(model, stages)
    yield from _quantized(model, stages)
    if model.lora is not None:
        for name in sorted(
            {name for stage in stages for name, each in stage.all_models.items() if each.policy == "past"}
        ):
            text = "copies of a policy with adapters are not supported; train all weights, or use policy: initial"
            yield ("model", "lora"), f"models.{name} is a mix of past copies of the policy, and {text}"


def _quantized(model: ModelConfig, stages: list[StageConfig]) -> Iterator[Conflict]:
    """Checks what takes weights of the model as they are."""
    if model.quantization is None:
        return
    if any(stage.trainer.ranks > 1 for stage in stages):
        yield ("model", "quantization"), "is not supported with several trainer.ranks; use 1, or remove this"
    for stage in stages:
        algorithm = stage.algorithm
        if isinstance(stage.engine, NativeEngineConfig) and stage.engine.weights is not None:
            text = "the engine shares these weights, and would round them once more"
            yield ("model", "quantization"), f"stage {stage.name}: {text} (engine.weights); remove one of the two"
        if algorithm.active_critic is not None:
            text = "a critic would train a copy of the policy's weights, which cannot be quantised"
            yield ("model", "quantization"), f"stage {stage.name}: {text}; remove this, or use an algorithm without one"


def _sharded_adapters(model: ModelConfig, stages: list[StageConfig]) -> Iterator[Conflict]:
    for index, stage in enumerate(stages):
        if model.lora is not None and stage.trainer.shards_weights:
            at: KeyPath = ("stages", index, "trainer") if len(stages) > 1 else ("trainer",)
            yield (*at, "sharding"), "adapters (model.lora) cannot be sharded yet; use `none`, or train all weights"


def _other_models(model: ModelConfig, stages: list[StageConfig]) -> Iterator[Conflict]:
    for index, stage in enumerate(stages):
        if stage.algorithm.trains_policy:
            continue
        name = f"algorithm `{stage.algorithm.name}`"
        if model.lora is not None:
            yield ("model", "lora"), f"{name} trains all weights of a model of its own; remove this"
        if index < len(stages) - 1:
            text = f"{name} changes no policy, and checkpoints of later stages do not hold what it trains"
            yield ("stages", index, "algorithm"), f"{text}; make it the last stage, or a run of its own"


def _new_model(new: NewModelConfig, stages: list[StageConfig]) -> Iterator[Conflict]:
    at: KeyPath = ("model", "new")
    if new.heads % new.kv_heads:
        yield (
            (*at, "kv_heads"),
            f"heads ({new.heads}) must be a multiple of kv_heads ({new.kv_heads}); change one of them",
        )
    if new.head_dim is None and new.hidden_size % new.heads:
        text = f"{new.hidden_size} is not a multiple of heads ({new.heads}); change one of them or give head_dim"
        yield (*at, "hidden_size"), text
    elif (new.head_dim or new.hidden_size // new.heads) % 2:
        key = "head_dim" if new.head_dim else "hidden_size"
        yield (
            (*at, key),
            "rotary positions need an even number of dimensions per head (hidden_size / heads, or head_dim)",
        )
    for stage in (view for each in stages for view in each.by_domain().values()):
        samples = stage.algorithm.uses_rollouts or stage.evaluation is not None
        if samples and stage.rollout.max_new_tokens >= new.context:
            longest = f"rollout.max_new_tokens ({stage.rollout.max_new_tokens})"
            text = f"{new.context} leaves no room for a prompt beside {longest}; raise it or lower that"
            yield (*at, "context"), text
            return
