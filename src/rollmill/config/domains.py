"""`domains`: kinds of tasks that one run learns together, each with rewards, rollouts and an algorithm of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollmill.config.algorithms import AlgorithmConfig
from rollmill.config.components import EnvironmentConfig, OperatorConfig, ToolConfig, WorkflowConfig
from rollmill.config.evaluation import EvaluationSampling, EvaluationSet
from rollmill.config.model import AuxiliaryModelConfig
from rollmill.config.rewards import RewardConfig, RewardManagerConfig
from rollmill.config.rollout import NgramConfig, RepetitionConfig
from rollmill.config.section import PlainName, Section
from rollmill.config.taskset import TasksetSection
from rollmill.config.workflows import RoleConfig


class DomainRollout(EvaluationSampling):
    """Rollout settings of a domain. Keys that are not set are taken from `rollout`."""

    temperature: float | None = Field(None, ge=0)
    """See rollout.temperature."""
    group_size: int | None = Field(None, ge=1, le=2**16)
    """Completions per task (the group)."""
    repetition: RepetitionConfig | None = None
    """See rollout.repetition."""
    ngram_draft: NgramConfig | None = None
    """See rollout.ngram_draft."""
    attempts: int | None = Field(None, ge=1)
    """See rollout.attempts."""
    time_limit_s: float | None = Field(None, gt=0)
    """See rollout.time_limit_s."""
    failures: Literal["stop", "reject"] | None = None
    """See rollout.failures."""


class DomainConfig(Section):
    """One kind of tasks. Keys that are not set are taken from the stage."""

    taskset: TasksetSection
    """Tasks of the domain, and their sampler: all keys of a taskset but `mix`."""
    weight: Annotated[float, Field(gt=0)] | list[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]]] = (
        1.0
    )
    """Relative share of the training tasks, which counts in the loss by their number alone; or a schedule, a list of
    [step, weight] with linear interpolation."""
    replay_share: float | None = Field(None, ge=0, le=1)
    """Share of the domain in the replayed groups (`buffer.replay`), exact on average and within one group in each step;
    0: none. Places that it cannot fill stay empty. Default: domains without a share divide the rest in proportion to
    their groups that may be replayed."""
    rewards: list[RewardConfig] | None = None
    """Rewards of the domain's completions."""
    reward_settings: RewardManagerConfig | None = None
    """Settings of the domain's reward manager."""
    workflow: WorkflowConfig | None = None
    """Rollout procedure of a task: a name or a section."""
    environment: EnvironmentConfig | None = None
    """Environment that the workflow acts in: a name or a section."""
    tools: list[ToolConfig] | None = None
    """Tools that the policy may call."""
    roles: dict[PlainName, RoleConfig] | None = None
    """Roles that the policy plays in the workflow."""
    models: dict[PlainName, AuxiliaryModelConfig] | None = None
    """Models besides the policy. Two domains may use one name only for the same model."""
    rollout: DomainRollout = DomainRollout()
    pipeline: list[OperatorConfig] | None = None
    """Operators for the domain's experiences."""
    algorithm: AlgorithmConfig | None = None
    """Algorithm for the domain's experiences: advantage, loss, aggregation, KL penalty and entropy bonus."""
    evaluation: EvaluationSet | None = None
    """Held-out tasks of the domain, as the evaluation set of its name. They are rolled out and scored like its training
    tasks, unless the set says otherwise."""

    @field_validator("weight")
    @classmethod
    def _steps_rise(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        steps = [step for step, _ in value]
        if not steps or steps != sorted(set(steps)):
            raise ValueError("a schedule is a list of [step, weight] with rising steps, such as [[0, 2], [100, 1]]")
        if not any(weight for _, weight in value):
            raise ValueError("every weight of the schedule is 0; give one that is above 0, or remove the domain")
        return value

    @model_validator(mode="after")
    def _evaluation_is_of_this_domain(self) -> Self:
        if self.evaluation is not None and self.evaluation.domain is not None:
            raise ValueError("evaluation.domain: the set belongs to the domain that it stands in; remove this key")
        return self

    def weight_at(self, step: int) -> float:
        """Returns the weight at a training step of the stage, from 0."""
        if not isinstance(self.weight, list):
            return self.weight
        before = [each for each in self.weight if each[0] <= step] or [self.weight[0]]
        after = [each for each in self.weight if each[0] > step] or [self.weight[-1]]
        (first, low), (second, high) = before[-1], after[0]
        return low if second <= first else low + (high - low) * max(step - first, 0) / (second - first)

    def overrides(self) -> dict[str, Any]:
        """Returns the sections that replace those of the stage, by key."""
        return {key: value for key in OVERRIDES if (value := getattr(self, key)) is not None}


OVERRIDES = (
    "rewards",
    "reward_settings",
    "workflow",
    "environment",
    "tools",
    "roles",
    "models",
    "pipeline",
    "algorithm",
)
"""Keys of a domain that replace the stage's section of the same name."""


class MixingConfig(Section):
    """Shares of the domains in the training tasks."""

    by: Literal["weight", "size", "need"] = "weight"
    """`weight`: the domains' weights. `size`: the weight times the number of tasks. `need`: the weight times the
    domain's need, the share of its groups that still teach something: whose rewards are not all equal."""
    least: float = Field(0.25, gt=0, le=1)
    """Smallest factor that the need may give a domain's weight, relative to the mean need. Only by `need`."""
    most: float = Field(4.0, ge=1)
    """Largest such factor. Only by `need`."""
    memory: int = Field(32, ge=1)
    """Number of a domain's groups over which its need is averaged, exponentially. Only by `need`."""
    lost_after_s: float = Field(30.0, gt=0)
    """Seconds without an answer after which an endpoint of a domain's judge or model counts as lost. A failed
    environment or workflow counts at once."""
    pause_s: float = Field(60.0, gt=0)
    """Seconds for which a domain that lost a service is paused, while the others go on; then it is tried again. Each
    pause in a row is twice as long."""
    pauses: int = Field(8, ge=0)
    """Pauses of a domain in a row before its failure ends the run; 0: the first one does."""

    def unused_keys(self) -> dict[str, str]:
        found = {}
        if self.by != "need":
            found = dict.fromkeys(("least", "most", "memory"), f"not honoured by `{self.by}`; it is by `need`")
        if self.pauses == 0:
            for key in ("pause_s", "lost_after_s"):
                found[key] = "not honoured with pauses: 0, where the first failure ends the run"
        return found
