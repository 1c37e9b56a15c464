"""Runs that no longer learn: steps in a row with zero reward, zero gradient or collapsed entropy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rollmill.config.monitor import MonitorConfig
from rollmill.config.rewards import attainable_maximum, reward_part_names
from rollmill.config.run import StageConfig
from rollmill.orchestrator.loop_callback import LoopCallback, TrainingStep
from rollmill.orchestrator.monitor import Monitor

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage

_COLLAPSED = 0.01  # nats per token; a policy whose best token has probability 0.999 has about this
_SOLVED = 0.95  # of the attainable reward: no gradient and no entropy are then the aim


class Symptom(StrEnum):
    """Sign of a run that learns nothing."""

    REWARD = "zero reward"
    GRADIENT = "zero gradient"
    ENTROPY = "collapsed entropy"


_ADVICE = {
    Symptom.REWARD: "every completion earned exactly 0. Look at some (`rollmill show RUN --step N`): the reward may "
    "misread them, rollout.max_new_tokens may cut them off, or the tasks are too hard for this model",
    Symptom.GRADIENT: "the weights did not change. All completions of each task may have earned the same: take tasks "
    "that the model solves sometimes, a larger rollout.group_size, or a reward with more levels",
    Symptom.ENTROPY: f"the entropy was below {_COLLAPSED:g} nats per token, so completions of a task hardly differ. "
    "Resume from an earlier checkpoint with a lower trainer.lr, an entropy bonus (algorithm.entropy) or a KL penalty",
}


class StuckDetector(LoopCallback):
    """Counts, for each symptom of a stage, the steps in a row that show it."""

    def __init__(self, stages: Iterable[StageConfig], config: MonitorConfig, monitor: Monitor) -> None:
        self._stages, self._config, self._monitor = {stage.name: stage for stage in stages}, config, monitor
        self._replayed = False
        self._steps: dict[tuple[str, Symptom], int] = {}  # steps in a row
        self._trained: dict[str, int] = {}  # steps of each stage
        self._said: set[tuple[str, Symptom]] = set()

    async def after_step(self, stage: Stage, step: TrainingStep) -> None:
        """Tell the user what the steps so far show, and end the stage if `monitor.stop_when_stuck` says so."""
        if not self._replayed:
            self.replay(row for row in self._monitor.recorded() if row["step"] < stage.version)
        found, stops = self.check(step.metrics), self._config.stop_when_stuck
        for text in found:
            self._monitor.stuck(text + ". The stage ends here (monitor.stop_when_stuck)" * stops, stage.version)
        stage.state.stopped |= stops and bool(found)

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over the steps of a resumed run, from its metrics.jsonl: nothing is said twice."""
        self._replayed = True
        for row in rows:
            if row.get("stage") in self._stages and "grad_norm" in row:
                self.check(row)

    def check(self, metrics: Mapping[str, Any]) -> list[str]:
        """Add a step; return what its stage has shown in `stuck_after` steps in a row: each symptom once per stage."""
        stage = self._stages[metrics["stage"]]
        trained = self._trained[stage.name] = self._trained.get(stage.name, 0) + 1
        shown = _symptoms(stage, metrics, trained)
        found = []
        for symptom in Symptom:
            key = (stage.name, symptom)
            self._steps[key] = self._steps.get(key, 0) + 1 if symptom in shown else 0
            count = self._steps[key]
            if count >= self._config.stuck_after and key not in self._said:
                self._said.add(key)
                found.append(f"{symptom} in {count} steps in a row of stage {stage.name}: {_ADVICE[symptom]}")
        return found


def _symptoms(stage: StageConfig, metrics: Mapping[str, Any], trained: int) -> set[Symptom]:
    algorithm = stage.algorithm
    critic = algorithm.active_critic
    if critic is not None and trained <= critic.warmup_steps:
        return set()  # the policy is not trained yet
    reward = metrics.get("reward/mean")
    if reward == 0 and metrics.get("reward/std") == 0:
        return {Symptom.REWARD}  # the others follow from it
    if reward is not None and _is_solved(stage, reward):
        return set()
    found = {Symptom.GRADIENT} if metrics.get("grad_norm") == 0 else set()
    if algorithm.uses_rollouts and reward is not None and metrics.get("entropy", _COLLAPSED) < _COLLAPSED:
        found.add(Symptom.ENTROPY)
    return found


def _is_solved(stage: StageConfig, reward: float) -> bool:
    """True if nearly all completions earn all that they can."""
    views = [view for domain in stage.by_domain().values() for view in domain.by_role().values()]
    maxima = [attainable_maximum(view.rewards, view.reward_settings, names) for view in views for names in _named(view)]
    known = [each for each in maxima if each is not None]
    return len(known) == len(maxima) and reward >= _SOLVED * max(known) > 0


def _named(stage: StageConfig) -> list[list[str] | None]:
    """Names of the rewards that a row may ask for: one by one, or all together (None)."""
    by_row = stage.taskset is not None and stage.taskset.fields.rewards is not None
    return [[name] for name in reward_part_names(stage.rewards)] if by_row else [None]
