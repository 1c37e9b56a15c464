"""Reads the batch of a training step from the store: the oldest fresh groups, and replayed ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rollmill.buffer import ExperienceStore, Group
from rollmill.buffer.offline_data import RatingOverrides
from rollmill.buffer.replay import mean_abs_advantage
from rollmill.config.run import StageConfig
from rollmill.orchestrator.metrics import REPLAYED
from rollmill.seeds import derive_seed
from rollmill.types import Experience

REPLAY_STREAM = 0x4E


def oldest_allowed(config: StageConfig, version: int) -> int:
    """The oldest version whose tokens may be trained on at `version`, by max_staleness and buffer.max_age."""
    staleness, age = config.max_staleness, config.buffer.max_age
    return version - (staleness if age is None else min(age, staleness))


class BatchReader:
    """Reads one stage's training batches from the store.

    Args:
        first_version: version of the weights at the start of the stage.
        seed: the seed of replay.
    """

    def __init__(
        self, config: StageConfig, store: ExperienceStore, ratings: RatingOverrides, *, first_version: int, seed: int
    ) -> None:
        self._config, self._store, self._ratings = config, store, ratings
        self._first_version, self._seed = first_version, seed
        self._shares = {
            name: each.replay_share for name, each in config.domains.items() if each.replay_share is not None
        }
        self._taken: list[Group] = []
        self._replayed: Counter[str] = Counter()  # groups by domain, "" without domains

    def replay(self, version: int) -> list[Experience]:
        """Return replayed experiences for the step after `version`, with the rewards people have given them since."""
        rule = self._config.buffer.replay
        self._taken = []
        if rule is None:
            return []
        seed = derive_seed(self._seed, REPLAY_STREAM)
        since = self._first_version  # earlier stages may have had other rewards
        step, shares = version + 1, self._shares
        for group in self._store.replay(rule, step=step, version=version, seed=seed, since=since, shares=shares):
            marked = [_marked(each) for each in self._ratings.apply_ratings(group.experiences)]
            self._taken.append(replace(group, experiences=marked))
        self._replayed = Counter(self._config.domain_of(group.experiences[0].task_id) for group in self._taken)
        return [experience for group in self._taken for experience in group.experiences]

    def take(self, version: int, min_version: int | None) -> list[Experience]:
        """Take the oldest fresh groups, a batch of them, for the step after `version`.

        Args:
            min_version: groups with older tokens are dropped.

        Raises:
            DeadlineError: there are too few.
        """
        rollout = self._config.rollout
        fresh = self._store.take(
            rollout.batch, step=version + 1, deadline_s=rollout.deadline_s, min_version=min_version
        )
        self._taken += fresh
        return [experience for group in fresh for experience in group.experiences]

    def mark_trained(self, version: int) -> None:
        """Report that the batch has been trained on, in the step that made `version`."""
        rule = self._config.buffer.replay
        if rule is not None and rule.priority == "advantage":
            for group in self._taken:
                group.priority = mean_abs_advantage(group)
            self._store.update_priorities(self._taken, step=version)
        self._taken = []

    def metrics(self) -> dict[str, float]:
        """Count of replayed groups in the last step, in all and by domain."""
        if self._config.buffer.replay is None:
            return {}
        by_domain = {f"domain/{name}/replayed": float(self._replayed[name]) for name in self._config.domains}
        return {"replay/groups": float(self._replayed.total()), **by_domain}


def _marked(experience: Experience) -> Experience:
    """Return a copy marked as replayed."""
    return replace(experience, info={**experience.info, REPLAYED: True}, advantage=None)
