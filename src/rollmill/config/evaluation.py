"""`evaluation`: held-out tasks, their rollouts and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.components import EnvironmentConfig, WorkflowConfig
from rollmill.config.rewards import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.section import PlainName, Section
from rollmill.config.taskset import TasksetConfig

VoteExtraction = Literal["auto", "boxed", "hash", "last_number", "text"]


class EvaluationSampling(Section):
    """Sampling settings of an evaluation. Keys that are not set are taken from `rollout`."""

    temperature: float | None = Field(None, ge=0)
    """Temperature of sampled completions; greedy ones have none."""
    top_p: float | None = Field(None, gt=0, le=1)
    """See rollout.top_p."""
    top_k: int | None = Field(None, ge=0)
    """See rollout.top_k."""
    min_p: float | None = Field(None, ge=0, le=1)
    """See rollout.min_p."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum completion length in tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Stop strings."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Token ids that end a completion."""

    def over(self, rollout: RolloutConfig) -> RolloutConfig:
        """Returns the rollout settings with these in their place."""
        given = {key: value for key in type(self).model_fields if (value := getattr(self, key)) is not None}
        return rollout.model_copy(update=given)


class EvaluationSet(Section):
    """One set of held-out tasks and its metrics. Keys that are not set are taken from the stage."""

    taskset: TasksetConfig
    """The held-out tasks."""
    limit: int | None = Field(None, ge=1)
    """Use only the first N held-out tasks."""
    domain: PlainName | None = None
    """Domain whose workflow, rewards and sampling the set uses instead of the stage's. A set inside a domain uses that
    domain's."""
    workflow: WorkflowConfig | None = None
    """Rollout procedure of a task. Default: the stage's."""
    environment: EnvironmentConfig | None = None
    """Environment that the workflow acts in. Default: the stage's."""
    rewards: list[RewardConfig] | None = None
    """Rewards that score completions. Default: the stage's."""
    role: str | None = None
    """Role whose reward says if a rollout is correct, one of `roles`. Default: the role of its last reply."""
    sampling: EvaluationSampling = EvaluationSampling()
    samples: int = Field(1, ge=0)
    """Sampled completions per task; 0 evaluates greedily only."""
    greedy: bool = True
    """Also measure greedy accuracy, with one completion per task."""
    threshold: float = 1.0
    """A completion is correct when its reward is at least this."""
    k: list[Annotated[int, Field(ge=1)]] = []
    """Measure pass@K for each K: the probability that at least one of K samples is correct. At most `samples`."""
    answer: VoteExtraction | None = None
    """Also measure maj@K for each K, the majority vote of K samples. Location of the answer that is voted on: `auto`,
    `boxed`, `hash` and `last_number` as in the reward `math`; `text` is the whole answer. None has reasoning."""

    def metrics(self, name: str) -> list[str]:
        """Returns the metrics that early stopping and `keep_best` may use, preferred first. `name` is "" for the
        unnamed set."""
        found = ["sampled"] if self.samples else []
        found += ["greedy"] if self.greedy else []
        found += [f"{what}@{k}" for k in self.k for what in (["pass", "maj"] if self.answer else ["pass"])]
        return [evaluation_metric_name(name, each) for each in [*found, "reward"]]


class EvaluationConfig(EvaluationSet):
    """Accuracy on held-out tasks: one set (`taskset` and the keys beside it), several (`sets`), or both."""

    taskset: TasksetConfig | None = None  # type: ignore[assignment]
    """Held-out tasks of the unnamed set. All keys but `every`, `at_start` and `sets` belong to that set."""
    every: int = Field(10, ge=1)
    """Evaluate every N steps, and after the last one."""
    at_start: bool = True
    """Also evaluate before the first step."""
    sets: dict[PlainName, EvaluationSet] = {}
    """Additional sets by name; their metrics are called eval/NAME/..."""

    def all_sets(self) -> Mapping[str, EvaluationSet]:
        """Returns every set by its name; the unnamed set has the name `""`."""
        return self.sets if self.taskset is None else {"": self, **self.sets}

    def tasksets(self) -> list[TasksetConfig]:
        """Returns all held-out tasksets."""
        return [each.taskset for each in self.all_sets().values()]

    def watched(self) -> list[str]:
        """Returns all metrics available to early stopping and `keep_best`; the first one is the default of
        `keep_best`."""
        return [each for name, section in self.all_sets().items() for each in section.metrics(name)]


def evaluation_metric_name(name: str, what: str) -> str:
    """Returns the name of a set's metric: eval/WHAT, or eval/NAME/WHAT."""
    return f"eval/{name}/{what}" if name else f"eval/{what}"
