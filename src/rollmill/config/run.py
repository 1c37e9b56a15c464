"""The run file: run-wide settings and the sections of a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rollmill.config.algorithms import AlgorithmConfig
from rollmill.config.algorithms.base import OfflineAlgorithmOptions
from rollmill.config.algorithms.baselines import GRPO
from rollmill.config.buffer import BufferConfig, OfflineDataConfig
from rollmill.config.changes import ChangeConfig
from rollmill.config.components import EnvironmentConfig, OperatorConfig, ToolConfig, WorkflowConfig, workflow_by_name
from rollmill.config.domains import DomainConfig, MixingConfig
from rollmill.config.engines import EngineConfig, NativeEngineConfig
from rollmill.config.evaluation import EvaluationConfig, EvaluationSet
from rollmill.config.model import AuxiliaryModelConfig, ModelConfig
from rollmill.config.monitor import MonitorConfig
from rollmill.config.offload import OptionalOffloadConfig
from rollmill.config.placement import InlinePlacement, PlacementConfig
from rollmill.config.rewards import RewardConfig, RewardManagerConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.section import FolderName, PlainName, Section
from rollmill.config.supervision import SupervisionConfig
from rollmill.config.taskset import MixEntry, TasksetConfig, TasksetSection, fill_decontamination_sets
from rollmill.config.trainer import TrainerConfig
from rollmill.config.workflows import RoleConfig, SingleTurnWorkflow
from rollmill.types import task_domain


class CheckpointConfig(Section):
    """Frequency and retention of checkpoints."""

    every: int = Field(10, ge=1)
    """Write a checkpoint every N steps, and at the end of each stage."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep. From 2 on a run can go on from an older one if the newest is damaged."""
    keep_best: bool | str = True
    """Also keep the checkpoint with the best evaluation: by the first set's sampled accuracy, else its greedy accuracy;
    or by the metric named here, such as eval/NAME/pass@4."""


class EarlyStopConfig(Section):
    """Stops a stage when an evaluation metric is good enough or no longer improves."""

    metric: str = "eval/sampled"
    """Metric to watch: eval/sampled, eval/greedy, eval/pass@K ..., or eval/NAME/... of a named set."""
    at_least: float | None = None
    """Stop once the metric reaches this value."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations without improvement."""

    @model_validator(mode="after")
    def _some_rule(self) -> EarlyStopConfig:
        if self.at_least is None and self.patience is None:
            raise ValueError("give at_least or patience")
        return self


_LEAST_WEIGHT = 1e-9  # of an entry of a mix whose schedule begins at 0


class StageConfig(Section):
    """One fully resolved stage of a run, as the orchestrator executes it."""

    name: FolderName = "train"
    steps: int = Field(100, ge=1)
    """Training steps of this stage."""
    max_staleness: int = Field(0, ge=0)
    """Maximum number of weight versions a rollout may lag behind the trained weights. 0: synchronous; 1: one-step
    off-policy."""
    sync_interval: int = Field(1, ge=1)
    """Publish the trainer's weights to engines in other processes after every N-th step (and before evaluations), so
    rollouts use weights that are up to N - 1 steps old. Needs max_staleness of at least N - 1, which bounds the
    staleness of every token as before."""
    taskset: TasksetConfig | None = None
    """Tasks to roll out or imitate. Required unless a stage learns from `offline_data.sources` alone, or has
    `domains`."""
    workflow: WorkflowConfig = SingleTurnWorkflow()
    """Rollout procedure of a task: a name or a section."""
    environment: EnvironmentConfig | None = None
    """Environment that the workflow acts in, if any: a name or a section."""
    tools: list[ToolConfig] = []
    """Tools that the policy may call in a workflow with tools: names or sections."""
    roles: dict[PlainName, RoleConfig] = {}
    """Roles that the policy plays in the workflow, by name. If there are any, the workflow may use no others."""
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = NativeEngineConfig()
    """Inference engine that generates completions: a name or a section."""
    rewards: list[RewardConfig] = []
    reward_settings: RewardManagerConfig = RewardManagerConfig()
    models: dict[PlainName, AuxiliaryModelConfig] = {}
    """Models besides the policy, such as an opponent or a judge. A workflow receives each one as the parameter of its
    name."""
    pipeline: list[OperatorConfig] = []
    """Operators that verify, drop, change or create experiences before the trainer sees them, in order."""
    buffer: BufferConfig = BufferConfig()
    offline_data: OfflineDataConfig = OfflineDataConfig()
    algorithm: AlgorithmConfig = GRPO()
    trainer: TrainerConfig = TrainerConfig()
    offload: OptionalOffloadConfig = None
    """Offloading of models and optimizer states in phases that do not need them: `none`, `auto` (only what does not
    fit), or a section."""
    evaluation: EvaluationConfig | None = None
    early_stop: EarlyStopConfig | None = None
    domains: dict[PlainName, DomainConfig] = {}
    """Kinds of tasks that are learned together, by name, instead of one `taskset`. Each may have its own rewards,
    workflow, sampling and algorithm; the other sections of the stage are its defaults."""
    mixing: MixingConfig = MixingConfig()
    """Shares of the domains."""

    @model_validator(mode="after")
    def _domains_are_a_mix(self) -> Self:
        """Makes the taskset and the evaluation sets of the domains."""
        if not self.domains:
            return self
        if self.taskset is not None:
            raise ValueError("taskset is not honoured beside domains; write it into one of them")
        entries = []
        for name, domain in self.domains.items():
            parts = {key: getattr(domain.taskset, key) for key in domain.taskset.model_fields_set}
            entries.append(MixEntry(name=name, weight=max(domain.weight_at(0), _LEAST_WEIGHT), **parts))
        self.taskset = TasksetConfig(mix=entries)
        held_out = {name: each.evaluation for name, each in self.domains.items() if each.evaluation is not None}
        if held_out:
            evaluation = self.evaluation or EvaluationConfig()
            if both := held_out.keys() & evaluation.sets.keys():
                raise ValueError(f"evaluation.sets.{min(both)}: the domain of that name has an evaluation; rename this")
            own = {name: each.model_copy(update={"domain": name}) for name, each in held_out.items()}
            self.evaluation = evaluation.model_copy(update={"sets": {**evaluation.sets, **own}})
        return self

    @model_serializer(mode="wrap")
    def _without_what_domains_make(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what `_domains_are_a_mix` makes, so that the result can be loaded again."""
        found: dict[str, Any] = handler(self)
        if self.domains:
            found.pop("taskset", None)
            evaluation = found.get("evaluation")
            if evaluation is not None:
                sets = evaluation.get("sets", {}).items()
                of_domains = {name for name, each in self.domains.items() if each.evaluation is not None}
                evaluation["sets"] = {name: each for name, each in sets if name not in of_domains}
        return found

    @model_validator(mode="after")
    def _held_out_tasks_are_known(self) -> Self:
        if self.evaluation is not None and self.taskset is not None:
            self.taskset = fill_decontamination_sets(self.taskset, self.evaluation.tasksets())
        return self

    def for_evaluation(self, by: EvaluationSet) -> StageConfig:
        """Returns this stage with the workflow, environment, rewards and sampling of an evaluation set."""
        base = self if by.domain is None else self.for_domain(by.domain)
        own = {key: value for key in ("workflow", "environment", "rewards") if (value := getattr(by, key)) is not None}
        return base.model_copy(update=own | {"rollout": by.sampling.over(base.rollout)})

    def for_domain(self, name: str) -> StageConfig:
        """Returns this stage as if the domain were all of it, with the evaluation sets of the domain.

        If the stage's algorithm rolls nothing out, it is that of all domains.
        """
        assert self.taskset is not None
        domain = self.domains[name]
        [entry] = [each for each in self.taskset.mix if each.name == name]
        taskset = TasksetConfig(**{key: getattr(entry, key) for key in TasksetSection.model_fields})
        plain = {"domains": {}, "mixing": MixingConfig(), "taskset": taskset, "evaluation": self._evaluation_of(name)}
        plain |= {"rollout": domain.rollout.over(self.rollout)}
        plain |= {} if self.algorithm.uses_rollouts else {"algorithm": self.algorithm}
        return self.model_copy(update=domain.overrides() | plain)

    def _evaluation_of(self, domain: str) -> EvaluationConfig | None:
        sets = {} if self.evaluation is None else self.evaluation.all_sets()
        own = {name: each.model_copy(update={"domain": None}) for name, each in sets.items() if each.domain == domain}
        return EvaluationConfig(sets=own) if own else None

    def by_domain(self) -> dict[str, StageConfig]:
        """Returns `for_domain` of each domain by its name; a stage without domains is its own, with the name ""."""
        return {name: self.for_domain(name) for name in self.domains} or {"": self}

    def domain_of(self, task_id: str) -> str:
        """Returns the domain of a task by its id; "" if the stage has no domains."""
        return task_domain(task_id) if self.domains else ""

    def by_role(self) -> dict[str, StageConfig]:
        """Returns the stage as the replies in each role see it, with the rewards of that role, by its name; a stage
        whose rewards are those of all roles is its own, with the name ""."""
        names = dict.fromkeys(each.role for each in self.rewards if each.role is not None)
        if not names:
            return {"": self}
        views = {}
        for name in names:
            own = [each for each in self.rewards if each.role in (None, name)]
            views[name] = self.model_copy(update={"rewards": [each.model_copy(update={"role": None}) for each in own]})
        return views

    def view_of(self, taskset: str) -> StageConfig:
        """Returns the stage as the tasks of a taskset see it: `for_domain` if there are domains."""
        return self.for_domain(taskset) if self.domains else self

    @property
    def uses_greedy(self) -> bool:
        """True if the algorithm needs one greedy completion per task."""
        advantage = getattr(self.algorithm, "advantage", None)
        return advantage is not None and advantage.uses_greedy

    @property
    def all_models(self) -> dict[str, AuxiliaryModelConfig]:
        """The models of the stage and of its domains."""
        return self.models | {
            key: model for each in self.domains.values() for key, model in (each.models or {}).items()
        }

    @property
    def groups_per_step(self) -> int:
        """Groups of a training step: tasks, demonstrations or pairs."""
        algorithm = self.algorithm
        return algorithm.batch if isinstance(algorithm, OfflineAlgorithmOptions) else self.rollout.batch

    def with_engine(self, engine: EngineConfig | None) -> StageConfig:
        """Returns this stage with another engine; with None, the stage itself. If the engine leaves the size of its
        cache to the run, it has that of the stage's engine."""
        if engine is None:
            return self
        own: Any = getattr(self.engine, "cache_gb", "auto")
        return self.model_copy(update={"engine": engine.settled(None if own == "auto" else own)})

    @property
    def workflows(self) -> list[WorkflowConfig]:
        """The workflows of the stage, of its domains and of its evaluation sets."""
        sets = [] if self.evaluation is None else self.evaluation.all_sets().values()
        found = [self.workflow, *(each.workflow for each in self.domains.values()), *(each.workflow for each in sets)]
        return [each for each in found if each is not None]

    @property
    def rows_name_workflows(self) -> bool:
        """True if rows of training tasks or of held-out ones may name their workflow."""
        sets = [] if self.evaluation is None else self.evaluation.all_sets().values()
        return any(each is not None and each.names_workflows for each in (self.taskset, *(one.taskset for one in sets)))

    def of_row(self, workflow: str) -> StageConfig:
        """Returns this stage with the workflow that a row names: its own, or another one with its defaults."""
        if workflow == self.workflow.name:
            return self
        return self.model_copy(update={"workflow": workflow_by_name(workflow)})

    @property
    def uses_task_examples(self) -> bool:
        """True if a workflow receives worked examples of the training tasks, or rows may name one that does."""
        return self.rows_name_workflows or any(each.takes("examples") for each in self.workflows)

    @property
    def needs_taskset(self) -> bool:
        """True if the stage rolls out tasks or takes demonstrations from the taskset."""
        if self.algorithm.uses_rollouts and self.workflow.uses_tasks:
            return True
        return self.algorithm.uses_examples and "taskset" in self.offline_data.sources

    @property
    def persistent(self) -> bool:
        """True if the stage is asynchronous, replays groups, or creates experiences for later use."""
        operators = [*self.pipeline, *(each for domain in self.domains.values() for each in domain.pipeline or [])]
        made = any(operator.creates_experiences for operator in operators)
        return self.max_staleness > 0 or self.buffer.replay is not None or made

    @property
    def evaluates_exclusively(self) -> bool:
        """True if evaluations run without concurrent rollouts: with early stopping, a token budget or over-sampling."""
        return self.early_stop is not None or self.rollout.token_budget is not None or self.rollout.oversample > 0

    @property
    def steps_ahead(self) -> int:
        """Number of steps that rollouts may be ahead of the trainer: tokens may also be stale since weights are."""
        return self.max_staleness - (self.sync_interval - 1)

    @property
    def required_taskset(self) -> TasksetConfig:
        """The taskset of a stage that needs one."""
        assert self.taskset is not None
        return self.taskset

    @model_validator(mode="after")
    def _endpoints_fail_in_time(self) -> Self:
        for view in self.by_domain().values():
            inside = [each for operator in view.pipeline for _, rewards in operator.reward_lists for each in rewards]
            for reward in (*view.rewards, *inside):
                longest, deadline = reward.longest_request_s, view.reward_settings.deadline_s
                if longest is not None and longest >= deadline:
                    raise ValueError(
                        f"reward_settings.deadline_s ({deadline:g}) is not above deadline_s + try_s ({longest:g}) of "
                        f"the reward `{reward.part_name}`, so an endpoint that is down would pass for a slow one; "
                        "raise reward_settings.deadline_s"
                    )
        return self


class RunConfig(StageConfig):
    """A run file. With `stages`, each stage is this file overlaid with the stage's own keys."""

    name: FolderName = "run"
    seed: int = 0
    """Seed of a new model's weights, the order of tasks and all sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto uses a GPU if torch finds one."""
    threads: Annotated[int, Field(ge=1, le=2**12)] | Literal["auto"] = 1
    """CPU threads of this process; auto measures, once on each machine. Two threads are often slower than one for small
    models."""
    model: ModelConfig = ModelConfig()
    placement: PlacementConfig = InlinePlacement()
    """Assignment of components to processes: a name or a section."""
    mode: Literal["both", "explore", "train", "bench", "serve"] = "both"
    """Mode of `rollmill run`. `both`: roll out and train; `placement` selects the processes. `train`: train on
    the rollouts of explorers that join as separate processes, or on what the buffer holds. `explore`: join such a run,
    or fill a buffer without a trainer (`await_trainer: false`).
    `bench`: evaluate the model. `serve`: serve it."""
    await_trainer: bool = True
    """With mode `explore`: join a trainer, and wait for one. False: no trainer takes part; roll out the groups of all
    steps at the weights of the model, and leave them in the buffer, for a trainer that starts there later."""
    trainer_away_s: float = Field(600.0, gt=0)
    """With mode `explore`: longest time without a sign of life from the trainer, for example while it starts or
    resumes."""
    explorer_silent_s: float = Field(20.0, gt=0)
    """With mode `train` and with placement `ray`: an explorer that gives no answer and writes no heartbeat for so long
    is lost, and others roll out its groups. One that writes heartbeats, but does not answer, is lost after 60 seconds
    (`placement.health_s`)."""
    plugins: list[Path] = []
    """Python files to import before the run file is checked. Components that they register (`@rollmill.reward`,
    `@rollmill.loss`, `@rollmill.advantage`, `@rollmill.algorithm`, `@rollmill.operator`, `@rollmill.task_operator`,
    `@rollmill.sampler`, `@rollmill.workflow`, `@rollmill.environment`, `@rollmill.tool`) are available by name."""
    changes: list[ChangeConfig] = []
    """Changes of the learning rate and of rewards' weights, and stops, after given steps: a plan, or the
    `changes.jsonl` of a run whose callbacks made them."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervise: SupervisionConfig = SupervisionConfig()
    monitor: MonitorConfig = MonitorConfig()
    stages: list[dict[str, Any]] = []
    """Stages to run one after the other; each starts from the previous stage's weights, with a fresh optimizer."""

    @property
    def is_split(self) -> bool:
        """True if explorers are processes that join the trainer's run."""
        return self.mode in ("train", "explore")
