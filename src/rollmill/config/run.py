"""The whole run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.buffer import BufferConfig, ExpertsConfig
from rollmill.config.engine import EngineConfig, NativeEngineConfig
from rollmill.config.environments import EnvironmentConfig
from rollmill.config.evaluation import EvaluationConfig, EvaluationSet
from rollmill.config.model import AuxiliaryModelConfig, ModelConfig
from rollmill.config.offload import OptionalOffloadConfig
from rollmill.config.operators import OperatorConfig
from rollmill.config.placement import InlinePlacement, PlacementConfig
from rollmill.config.rewards import JudgeSection, RewardConfig
from rollmill.config.rewards.base import RewardManagerConfig
from rollmill.config.rewards.names import reward_part_names
from rollmill.config.rollout import RolloutConfig
from rollmill.config.section import FolderName, PlainName, Section
from rollmill.config.taskset import TasksetConfig, fill_decontamination_sets
from rollmill.config.tools import ToolConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.config.workflows import FewShotWorkflow, SingleTurnWorkflow, WorkflowConfig
from rollmill.recipes import GRPO, AlgorithmConfig


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every: int = Field(10, ge=1)
    """Write one after every N steps, and at the end of each stage."""
    keep_last: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_best: bool | str = True
    """Also keep the checkpoint with the best evaluation: by sampled accuracy, else greedy, of the first set; or by the
    metric that is named here, such as eval/NAME/pass@4."""


class EarlyStopConfig(Section):
    """Stop a stage when an evaluated metric is good enough, or no longer improves."""

    metric: str = "eval/sampled"
    """The metric that is watched: eval/sampled, eval/greedy, eval/pass@K ..., or eval/NAME/... of a set with a name."""
    at_least: float | None = None
    """Stop once the metric reaches this value."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations without improvement."""

    @model_validator(mode="after")
    def _some_rule(self) -> EarlyStopConfig:
        if self.at_least is None and self.patience is None:
            raise ValueError("give at_least or patience")
        return self


class MonitorConfig(Section):
    """What a run shows and writes."""

    tensorboard: bool = False
    """Write TensorBoard event files to RUN/tensorboard (extra `tensorboard`)."""
    show_completions: int = Field(1, ge=0)
    """Sample completions in the terminal view."""
    rollouts_every: int = Field(1, ge=1)
    """Store the experiences of every Nth step under RUN/rollouts."""
    timeline_every: int = Field(10, ge=1)
    """Write when each completion was generated and judged to RUN/timeline.jsonl, for the first and every Nth step."""
    report: bool = True
    """Write RUN/report.html at the end."""


class StageConfig(Section):
    """One stage of a run, fully resolved: what the master executes."""

    name: FolderName = "train"
    steps: int = Field(100, ge=1)
    """Training steps of this stage."""
    max_staleness: int = Field(0, ge=0)
    """How many versions older than the trained weights a rollout may be. 0 synchronous, 1 one-step-off-policy."""
    taskset: TasksetConfig | None = None
    """What is rolled out or imitated. Needed by all stages but those that learn from `experts.sources` alone."""
    workflow: WorkflowConfig = SingleTurnWorkflow()
    """How a task is rolled out: a name, or a section."""
    environment: EnvironmentConfig | None = None
    """What the workflow acts in, if it acts in something: a name, or a section."""
    tools: list[ToolConfig] = []
    """What the policy may call in a workflow with tools: names, or sections."""
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = NativeEngineConfig()
    """What generates completions: a name, or a section."""
    rewards: list[RewardConfig] = []
    judging: RewardManagerConfig = RewardManagerConfig()
    models: dict[PlainName, AuxiliaryModelConfig] = {}
    """Models besides the policy, such as an opponent or a judge; a workflow gets each as the part of its name."""
    pipeline: list[OperatorConfig] = []
    """Operators that verify, drop, change or make experiences before they are learned from, in order."""
    buffer: BufferConfig = BufferConfig()
    experts: ExpertsConfig = ExpertsConfig()
    algorithm: AlgorithmConfig = GRPO()
    trainer: TrainerConfig = TrainerConfig()
    residency: OptionalOffloadConfig = None
    """What leaves the device in phases that do not need it: `none`, `auto` (what has no room), or a section."""
    evaluation: EvaluationConfig | None = None
    early_stop: EarlyStopConfig | None = None

    @model_validator(mode="after")
    def _held_out_tasks_are_known(self) -> Self:
        if self.evaluation is not None and self.taskset is not None:
            self.taskset = fill_decontamination_sets(self.taskset, self.evaluation.tasksets())
        return self

    def for_evaluation(self, by: EvaluationSet) -> StageConfig:
        """This stage with the workflow, environment, rewards and sampling that a set of held-out tasks asks for."""
        own = {key: value for key in ("workflow", "environment", "rewards") if (value := getattr(by, key)) is not None}
        return self.model_copy(update=own | {"rollout": by.sampling.over(self.rollout)})

    def with_engine(self, engine: EngineConfig | None) -> StageConfig:
        """This stage with another engine; None: with its own."""
        return self if engine is None else self.model_copy(update={"engine": engine})

    @property
    def workflows(self) -> list[WorkflowConfig]:
        """The stage's workflow, and those of its held-out tasks."""
        sets = [] if self.evaluation is None else self.evaluation.all_sets().values()
        return [self.workflow, *(each.workflow for each in sets if each.workflow is not None)]

    @property
    def uses_task_examples(self) -> bool:
        """Whether a workflow is given worked examples of the training tasks."""
        return any(
            each.takes("examples") or (isinstance(each, FewShotWorkflow) and not each.examples)
            for each in self.workflows
        )

    @property
    def needs_taskset(self) -> bool:
        """Whether anything is rolled out, or taken from the taskset."""
        if self.algorithm.uses_rollouts and self.workflow.uses_tasks:
            return True
        return self.algorithm.uses_examples and "taskset" in self.experts.sources

    @property
    def persistent(self) -> bool:
        """Whether it is asynchronous, learns from groups again, or makes experiences for later use."""
        made = any(operator.creates_experiences for operator in self.pipeline)
        return self.max_staleness > 0 or self.buffer.replay is not None or made

    @property
    def evaluates_exclusively(self) -> bool:
        """Whether nothing is rolled out beside an evaluation: it decides what comes next, or rollouts are cut short."""
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
    """Where the model lives; auto takes a GPU where torch finds one."""
    threads: Annotated[int, Field(ge=1, le=2**12)] | Literal["auto"] = 1
    """CPU threads of this process; auto measures. Two threads are often slower than one for small models."""
    model: ModelConfig = ModelConfig()
    placement: PlacementConfig = InlinePlacement()
    """In which processes components live: a name, or a section."""
    mode: Literal["both", "explore", "train", "bench", "serve"] = "both"
    """What `rollmill run` does. `both`: explore and train in one process. `train`: train on what others put into the
    buffer. `explore`: join a run whose trainer is another process. `bench`: evaluate the model. `serve`: serve it."""
    trainer_away_s: float = Field(600.0, gt=0)
    """With mode `explore`: how long the trainer may say nothing, while it is started or resumed."""
    plugins: list[Path] = []
    """Python files imported before the run file is checked; what they register (`@rollmill.reward`, `@rollmill.loss`,
    `@rollmill.advantage`, `@rollmill.algorithm`, `@rollmill.operator`, `@rollmill.task_operator`, `@rollmill.order`,
    `@rollmill.workflow`, `@rollmill.environment`, `@rollmill.tool`) is found by name."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    stages: list[dict[str, Any]] = []
    """Stages run one after the other; each starts from the last one's weights, with a fresh optimizer."""

    @property
    def is_split(self) -> bool:
        """Whether explorers and trainer are processes of their own."""
        return self.mode in ("train", "explore")
