"""Rewards that give no verdict for most completions of a step: a warning at first, an error if it lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.config.rewards import reward_part_names
from rollmill.config.run import StageConfig
from rollmill.errors import RewardError
from rollmill.orchestrator.loop_callback import LoopCallback, TrainingStep
from rollmill.orchestrator.monitor import Monitor
from rollmill.rewards.base import LATE, TIMEOUT
from rollmill.rewards.judges.chat import REFUSED, UNPARSABLE
from rollmill.types import Experience

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage


class MissingVerdicts(LoopCallback):
    """Counts, for each reward of a stage, the steps in a row that mostly lacked its verdicts."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._steps: dict[tuple[str, str], int] = {}  # (stage, reward) -> steps in a row
        self._warned: set[tuple[str, str]] = set()

    async def after_step(self, stage: Stage, step: TrainingStep) -> None:
        """Warn of each reward of a stage once in the run.

        Raises RewardError after `reward_settings.missing_steps` such steps in a row.
        """
        config = stage.config
        missing = rewards_without_verdict(step.experiences, config)
        found = {(config.name, name): reason for name, reason in missing.items()}
        self._steps = {key: self._steps.get(key, 0) + 1 for key in found}
        for key, reason in found.items():
            if self._steps[key] == config.reward_settings.missing_steps:
                raise RewardError(
                    f"stage {config.name}: {reason}; it was so in {self._steps[key]} steps in a row, which "
                    "reward_settings.missing_limit and reward_settings.missing_steps do not allow. Fix it, then resume "
                    "the run from its last checkpoint"
                )
            if key not in self._warned:
                self._monitor.message(f"warning: {reason}")
        self._warned |= found.keys()


def rewards_without_verdict(experiences: list[Experience], stage: StageConfig) -> dict[str, str]:
    """Rewards without a verdict for more than `reward_settings.missing_limit` of a batch, with reason and advice."""
    sections = {
        name: section
        for view in stage.by_domain().values()
        for name, section in zip(reward_part_names(view.rewards), view.rewards, strict=True)
    }
    outcomes: dict[str, list[str]] = {}
    for experience in experiences:
        for name, outcome in experience.info.get("outcomes", {}).items():
            outcomes.setdefault(name, []).append(outcome)
    found = {}
    for name, results in outcomes.items():
        judged_late = name in sections and sections[name].timeout_is_verdict
        late = sum(outcome == LATE or (outcome == TIMEOUT and not judged_late) for outcome in results)
        unread = sum(outcome in (UNPARSABLE, REFUSED) for outcome in results)
        if late + unread <= stage.reward_settings.missing_limit * len(results):
            continue
        of = f"of {len(results)} judgements of reward `{name}`"
        if late >= unread:
            found[name] = (
                f"{late} {of} took too long and earned its timeout_reward; raise its time_limit_s (or "
                "reward_settings.deadline_s), or make it faster"
            )
        else:
            found[name] = (
                f"{unread} {of} got no verdict from its model and earned its unparsable_reward; raise its max_tokens, "
                "or take another model"
            )
    return found
