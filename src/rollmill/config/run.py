"""The run file: run-wide settings and the sections of a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.algorithms import AlgorithmConfig
from rollmill.config.algorithms.baselines import GRPO
from rollmill.config.buffer import BufferConfig, ExpertsConfig
from rollmill.config.engines import EngineConfig, NativeEngineConfig
from rollmill.config.environments import EnvironmentConfig
from rollmill.config.evaluation import EvaluationConfig, EvaluationSet
from rollmill.config.model import AuxiliaryModelConfig, ModelConfig
from rollmill.config.offload import OptionalOffloadConfig
from rollmill.config.operators import OperatorConfig
from rollmill.config.placement import InlinePlacement, PlacementConfig, RayPlacement
from rollmill.config.rewards import RewardConfig
from rollmill.config.rewards.base import RewardManagerConfig, reward_part_names
from rollmill.config.rewards.judges import JudgeSection
from rollmill.config.rollout import RolloutConfig
from rollmill.config.section import FolderName, PlainName, Section
from rollmill.config.supervision import SupervisionConfig
from rollmill.config.taskset import TasksetConfig, fill_decontamination_sets
from rollmill.config.tools import ToolConfig
from rollmill.config.trackers import MonitorConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.config.workflows import SingleTurnWorkflow, WorkflowConfig


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


class StageConfig(Section):
    """One fully resolved stage of a run, as the orchestrator executes it."""

    name: FolderName = "train"
    steps: int = Field(100, ge=1)
    """Training steps of this stage."""
    max_staleness: int = Field(0, ge=0)
    """Maximum number of weight versions a rollout may lag behind the trained weights. 0: synchronous; 1: one-step
    off-policy."""
    taskset: TasksetConfig | None = None
    """Tasks to roll out or imitate. Required unless a stage learns from `experts.sources` alone."""
    workflow: WorkflowConfig = SingleTurnWorkflow()
    """Rollout procedure of a task: a name or a section."""
    environment: EnvironmentConfig | None = None
    """Environment that the workflow acts in, if any: a name or a section."""
    tools: list[ToolConfig] = []
    """Tools that the policy may call in a workflow with tools: names or sections."""
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = NativeEngineConfig()
    """Inference engine that generates completions: a name or a section."""
    rewards: list[RewardConfig] = []
    judging: RewardManagerConfig = RewardManagerConfig()
    models: dict[PlainName, AuxiliaryModelConfig] = {}
    """Models besides the policy, such as an opponent or a judge. A workflow receives each one as the parameter of its
    name."""
    pipeline: list[OperatorConfig] = []
    """Operators that verify, drop, change or create experiences before the trainer sees them, in order."""
    buffer: BufferConfig = BufferConfig()
    experts: ExpertsConfig = ExpertsConfig()
    algorithm: AlgorithmConfig = GRPO()
    trainer: TrainerConfig = TrainerConfig()
    residency: OptionalOffloadConfig = None
    """Offloading of models and optimizer states in phases that do not need them: `none`, `auto` (only what does not
    fit), or a section."""
    evaluation: EvaluationConfig | None = None
    early_stop: EarlyStopConfig | None = None

    @model_validator(mode="after")
    def _held_out_tasks_are_known(self) -> Self:
        if self.evaluation is not None and self.taskset is not None:
            self.taskset = fill_decontamination_sets(self.taskset, self.evaluation.tasksets())
        return self

    def for_evaluation(self, by: EvaluationSet) -> StageConfig:
        """Returns this stage with the workflow, environment, rewards and sampling of an evaluation set."""
        own = {key: value for key in ("workflow", "environment", "rewards") if (value := getattr(by, key)) is not None}
        return self.model_copy(update=own | {"rollout": by.sampling.over(self.rollout)})

    def with_engine(self, engine: EngineConfig | None) -> StageConfig:
        """Returns this stage with another engine; with None, the stage itself."""
        return self if engine is None else self.model_copy(update={"engine": engine})

    @property
    def workflows(self) -> list[WorkflowConfig]:
        """The stage's workflow and those of its evaluation sets."""
        sets = [] if self.evaluation is None else self.evaluation.all_sets().values()
        return [self.workflow, *(each.workflow for each in sets if each.workflow is not None)]

    @property
    def uses_task_examples(self) -> bool:
        """True if a workflow receives worked examples of the training tasks."""
        return any(each.takes("examples") for each in self.workflows)

    @property
    def needs_taskset(self) -> bool:
        """True if the stage rolls out tasks or takes demonstrations from the taskset."""
        if self.algorithm.uses_rollouts and self.workflow.uses_tasks:
            return True
        return self.algorithm.uses_examples and "taskset" in self.experts.sources

    @property
    def persistent(self) -> bool:
        """True if the stage is asynchronous, replays groups, or creates experiences for later use."""
        made = any(operator.creates_experiences for operator in self.pipeline)
        return self.max_staleness > 0 or self.buffer.replay is not None or made

    @property
    def evaluates_exclusively(self) -> bool:
        """True if evaluations run without concurrent rollouts: with early stopping, a token budget or over-sampling."""
        return self.early_stop is not None or self.rollout.token_budget is not None or self.rollout.oversample > 0

    @property
    def required_taskset(self) -> TasksetConfig:
        """The taskset of a stage that needs one."""
        assert self.taskset is not None
        return self.taskset

    @model_validator(mode="after")
    def _endpoints_fail_in_time(self) -> Self:
        inside = [reward for operator in self.pipeline for _, rewards in operator.reward_lists for reward in rewards]
        for reward in (*self.rewards, *inside):
            if isinstance(reward, JudgeSection) and reward.endpoint is not None:
                longest, deadline = reward.deadline_s + reward.try_s, self.judging.deadline_s
                if longest >= deadline:
                    raise ValueError(
                        f"judging.deadline_s ({deadline:g}) is not above deadline_s + try_s ({longest:g}) of the "
                        f"reward `{reward_part_names([reward])[0]}`, so an endpoint that is down would pass for a slow "
                        "one; raise judging.deadline_s"
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
    """CPU threads of this process; auto measures. Two threads are often slower than one for small models."""
    model: ModelConfig = ModelConfig()
    placement: PlacementConfig = InlinePlacement()
    """Assignment of components to processes: a name or a section."""
    mode: Literal["both", "explore", "train", "bench", "serve"] = "both"
    """Mode of `rollmill run`. `both`: roll out and train; `placement` selects the processes. `train`: train on
    the rollouts of explorers that join as separate processes, or on what the buffer holds. `explore`: join such a run.
    `bench`: evaluate the model. `serve`: serve it."""
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
    `@rollmill.order`, `@rollmill.workflow`, `@rollmill.environment`, `@rollmill.tool`) are available by name."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervise: SupervisionConfig = SupervisionConfig()
    monitor: MonitorConfig = MonitorConfig()
    stages: list[dict[str, Any]] = []
    """Stages to run one after the other; each starts from the previous stage's weights, with a fresh optimizer."""

    @property
    def supervision(self) -> SupervisionConfig:
        """`supervise`, with the former key placement.restarts."""
        former = self.placement.restarts if isinstance(self.placement, RayPlacement) else None
        return self.supervise if former is None else self.supervise.model_copy(update={"restarts": former})

    @property
    def is_split(self) -> bool:
        """True if explorers are processes that join the trainer's run."""
        return self.mode in ("train", "explore")
