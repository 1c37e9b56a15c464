"""Chooses groups for replay from a few numbers per group; shared by all stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.buffer.base import Group, Shares
from rollmill.config.buffer import ReplayConfig
from rollmill.types import task_domain

_STREAM, _QUOTA_STREAM = 0x5EB1A7, 0x5EB1A8


@dataclass(frozen=True, slots=True)
class ReplayCandidates:
    """Groups that were taken for earlier steps, in the order of arrival; all arrays are [N].

    `priority` is the initial one, `noted` that after the last use (NaN if none was recorded); `uses` is the number of
    uses, and `last` the step of the last one. `task_id` is a list [N].
    """

    number: npt.NDArray[np.int64]
    oldest_version: npt.NDArray[np.int64]
    priority: npt.NDArray[np.float64]
    noted: npt.NDArray[np.float64]
    uses: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    task_id: Sequence[str]

    @classmethod
    def of(cls, groups: Sequence[tuple[Any, ...]], history: Sequence[tuple[Any, ...]]) -> ReplayCandidates:
        """Build from rows (number, oldest version, priority, task id) of groups, and (number, step, priority) of
        uses.
        """
        place = {row[0]: index for index, row in enumerate(groups)}
        noted = np.full(len(groups), np.nan)
        uses, last = np.zeros(len(groups), np.int64), np.zeros(len(groups), np.int64)
        for number, step, priority in history:
            if (index := place.get(number)) is not None:
                uses[index] += 1
                last[index] = step
                noted[index] = noted[index] if priority is None else priority
        columns = list(zip(*groups, strict=True)) or [(), (), (), ()]
        numbers, versions, given, tasks = columns
        ids, oldest = np.array(numbers, np.int64), np.array(versions, np.int64)
        return cls(ids, oldest, np.array(given, np.float64), noted, uses, last, tasks)


def choose_replayed(
    candidates: ReplayCandidates,
    rule: ReplayConfig,
    *,
    step: int,
    version: int,
    seed: int,
    shares: Shares | None = None,
) -> list[int]:
    """Numbers of the groups to replay in `step`, a pure function of its arguments.

    Orders `uniform` and `priority` draw without replacement in proportion to the weights, by the Gumbel-top-k trick
    (Kool et al., arXiv:1903.06059, equal to Efraimidis and Spirakis, 2006). A group without policy tokens has age 0, as
    has an imported one of a later version than the trainer's; one of weight 0 is never drawn.

    Args:
        shares: of some domains, see `replay_quotas`; within a quota the order is that of `rule`.
    """
    age = np.where(candidates.oldest_version >= 0, np.maximum(version - candidates.oldest_version, 0), 0)
    may = step - candidates.last >= rule.cooldown
    if rule.max_uses is not None:
        may &= candidates.uses < rule.max_uses
    if rule.max_age is not None:
        may &= age <= rule.max_age
    places = np.flatnonzero(may)
    if rule.order == "fifo":
        ranked = places[np.lexsort((candidates.number[places], candidates.last[places]))]
    else:
        weights = np.zeros(len(places))
        if rule.order == "priority":
            weights = _log_weights(candidates, rule, age.astype(np.float64))[places]
        draws = np.random.default_rng([_STREAM, seed % 2**64, step]).gumbel(size=len(places))
        keys = weights + draws
        order = np.argsort(-keys, kind="stable")
        ranked = places[order[np.isfinite(keys[order])]]
    if not shares:
        return [int(number) for number in candidates.number[ranked[: rule.groups]]]
    left, chosen = replay_quotas(shares, rule.groups, step=step, seed=seed), []
    for place in ranked:
        domain = task_domain(candidates.task_id[place])
        domain = domain if domain in shares else ""
        if left[domain]:
            left[domain] -= 1
            chosen.append(int(candidates.number[place]))
    return chosen


def replay_quotas(shares: Shares, groups: int, *, step: int, seed: int) -> dict[str, int]:
    """Number of groups that each domain may replay in a step; the key "" is all domains without a share.

    By systematic sampling: in each step a number is its exact share rounded up or down, at random in such a way that
    the mean is exact; the sum is `groups`. A pure function of its arguments, whatever the order of `shares`.
    """
    names = sorted(shares)
    edges = np.cumsum([shares[name] for name in names])
    edges[np.isclose(edges, 1.0)] = 1.0
    offset = np.random.default_rng([_QUOTA_STREAM, seed % 2**64, step]).random()
    found = np.searchsorted(edges, (np.arange(groups) + offset) / groups, side="right")
    return dict(zip([*names, ""], np.bincount(found, minlength=len(names) + 1).tolist(), strict=True))


def _log_weights(
    candidates: ReplayCandidates, rule: ReplayConfig, age: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """log of priority ** exponent * decay ** age; -inf where it is 0."""
    priority = candidates.priority
    if rule.priority == "advantage":
        priority = np.where(np.isnan(candidates.noted), priority, candidates.noted)
    weights: npt.NDArray[np.float64] = age * np.log(rule.decay)
    if rule.exponent > 0:
        with np.errstate(divide="ignore"):
            weights += rule.exponent * np.log(priority)
    return weights


def mean_abs_advantage(group: Group) -> float:
    """Mean absolute advantage over the action tokens of a group: replay's priority `advantage`.

    0 if the trainer set no advantages.
    """
    total, tokens = 0.0, 0
    for experience in group.experiences:
        if experience.advantage is not None:
            total += float(np.abs(experience.advantage[experience.action_mask]).sum(dtype=np.float64))
            tokens += experience.action_tokens
    return total / tokens if tokens else 0.0
