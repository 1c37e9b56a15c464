"""`evaluation`: held-out tasks, how they are rolled out, and what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.environments import EnvironmentConfig
from rollmill.config.rewards import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.section import PlainName, Section
from rollmill.config.taskset import TasksetConfig
from rollmill.config.workflows import WorkflowConfig

VoteExtraction = Literal["auto", "boxed", "hash", "last_number", "text"]


class EvaluationSampling(Section):
    """How completions of an evaluation are sampled; a key that is left out is that of `rollout`."""

    temperature: float | None = Field(None, ge=0)
    """Of sampled completions; greedy ones have none."""
    top_p: float | None = Field(None, gt=0, le=1)
    """See rollout.top_p."""
    top_k: int | None = Field(None, ge=0)
    """See rollout.top_k."""
    min_p: float | None = Field(None, ge=0, le=1)
    """See rollout.min_p."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest completion in tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Stop strings."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Token ids that end a completion."""

    def over(self, rollout: RolloutConfig) -> RolloutConfig:
        """The settings of rollouts with these in place of theirs."""
        given = {key: value for key in type(self).model_fields if (value := getattr(self, key)) is not None}
        return rollout.model_copy(update=given)


class EvaluationSet(Section):
    """One set of held-out tasks and how it is measured. What is left out is as in the stage."""

    taskset: TasksetConfig
    """The held-out tasks."""
    limit: int | None = Field(None, ge=1)
    """Use only the first N held-out tasks."""
    workflow: WorkflowConfig | None = None
    """How a task is rolled out. Default: the stage's."""
    environment: EnvironmentConfig | None = None
    """What the workflow acts in. Default: the stage's."""
    rewards: list[RewardConfig] | None = None
    """What judges. Default: the stage's."""
    sampling: EvaluationSampling = EvaluationSampling()
    samples: int = Field(1, ge=0)
    """Sampled completions per task; 0 evaluates greedily only."""
    greedy: bool = True
    """Also measure greedy accuracy, with one completion per task."""
    threshold: float = 1.0
    """A completion is correct when its reward is at least this."""
    k: list[Annotated[int, Field(ge=1)]] = []
    """Measure pass@K for each K: the chance that one of K samples is correct. At most `samples`."""
    answer: VoteExtraction | None = None
    """Also measure maj@K for each K, a vote of K samples: where the answer that is voted for stands. `auto`, `boxed`,
    `hash` and `last_number` as in the reward `math`; `text` is the whole completion."""

    def metrics(self, name: str) -> list[str]:
        """What early stopping and `keep_best` may go by, best for this first; `name` is "" for the short form."""
        found = ["sampled"] if self.samples else []
        found += ["greedy"] if self.greedy else []
        found += [f"{what}@{k}" for k in self.k for what in (["pass", "maj"] if self.answer else ["pass"])]
        return [evaluation_metric_name(name, each) for each in [*found, "reward"]]


class EvaluationConfig(EvaluationSet):
    """Accuracy on held-out tasks: of one set (`taskset` and the keys beside it), of several (`sets`), or both."""

    taskset: TasksetConfig | None = None  # type: ignore[assignment]
    """The held-out tasks of the set without a name. All keys but `every`, `at_start` and `sets` are of that set."""
    every: int = Field(10, ge=1)
    """Evaluate after every N steps, and after the last."""
    at_start: bool = True
    """Evaluate before the first step, too."""
    sets: dict[PlainName, EvaluationSet] = {}
    """Further sets by name; their metrics are called eval/NAME/..."""

    def all_sets(self) -> Mapping[str, EvaluationSet]:
        """Every set by its name; the one without a name is ""."""
        return self.sets if self.taskset is None else {"": self, **self.sets}

    def tasksets(self) -> list[TasksetConfig]:
        """All held-out tasks."""
        return [each.taskset for each in self.all_sets().values()]

    def watched(self) -> list[str]:
        """All metrics that may be gone by; the first is what the best checkpoint is chosen by unless it is said."""
        return [each for name, section in self.all_sets().items() for each in section.metrics(name)]


def evaluation_metric_name(name: str, what: str) -> str:
    """What a set's number is called: eval/WHAT, or eval/NAME/WHAT."""
    return f"eval/{name}/{what}" if name else f"eval/{what}"
