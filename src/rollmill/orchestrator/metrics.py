"""Metrics of a training step: batch, engine, drafts, rewards and environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rollmill.errors import RewardError
from rollmill.rewards.base import LATE, TIMEOUT
from rollmill.trackers.trace import REWARD, Span, max_queue_depth
from rollmill.types import (
    Experience,
    ExperienceSource,
    StopReason,
    first_per_rollout,
    most_varied_rewards,
    task_domain,
)

REPLAYED = "replayed"  #: key of `info` of replayed completions
STEPS, SECONDS = "environment/steps", "environment/step_seconds"
PHASES = ("rollout", "inference", "reward", "train", "eval")
"""Phases of a step, in order."""
_ENGINE = ("updates", "ipc_updates", "update_seconds", "sleeps", "destroyed", "restarts")
"""Counters of engines in other processes."""


def require_rewards(experiences: list[Experience], where: str) -> None:
    """Raise RewardError if no reward applied to any of the completions."""
    usual = [e for e in experiences if e.source is ExperienceSource.ROLLOUT and e.reward_parts]
    if usual and all(e.reward is None for e in usual):
        names = ", ".join(dict.fromkeys(part for e in usual for part in e.reward_parts))
        raise RewardError(
            f"{where}: no reward ({names}) applies to any of the {len(usual)} completions (first: task "
            f"{usual[0].task_id}), so nothing can be learned or measured; correct `rewards`, or give the tasks what "
            "they compare with (taskset.fields.answer)"
        )


def batch_metrics(experiences: list[Experience], version: int) -> dict[str, float]:
    """Rewards, lengths and staleness of a batch about to be trained on at weights `version`.

    Replayed completions count as experiences and tokens only; rewards are those of fresh ones.
    """
    usual = [e for e in experiences if e.source is ExperienceSource.ROLLOUT and REPLAYED not in e.info]
    metrics: dict[str, float] = {
        "experiences": len(experiences),
        "tokens": sum(len(e.token_ids) for e in experiences),
    }
    again = [e for e in experiences if REPLAYED in e.info]
    if again:
        metrics["replay/age"] = float(np.mean([e.staleness(version) for e in again]))
    if experts := len({e.id for e in experiences if e.source is not ExperienceSource.ROLLOUT}):
        metrics["experts"] = experts
    if not usual:
        return metrics
    rollouts = first_per_rollout(usual)
    rewards = np.array([e.reward for e in rollouts if e.reward is not None], np.float64)
    learned = [e for e in usual if e.action_tokens]  # an operator may have masked all tokens
    lengths = np.array([e.action_tokens for e in learned] or [0], np.float64)
    staleness = np.array([e.staleness(version) for e in learned] or [0], np.float64)
    metrics |= {
        "completions": len(rollouts),
        "judged": len(rewards),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([e.stop_reason is StopReason.LENGTH for e in usual])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }
    if repeated := sum(e.stop_reason is StopReason.REPETITION for e in usual):
        metrics["length/repeated"] = repeated / len(usual)
    if len(rewards):
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    for name in dict.fromkeys(part for e in rollouts for part in e.reward_parts):
        values = [value for e in rollouts if (value := e.reward_parts.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    details = [e.info.get("details", {}) for e in rollouts]
    for name in dict.fromkeys(name for each in details for name in each):
        metrics[f"reward/{name}"] = float(np.mean([each[name] for each in details if name in each]))
    numbers = [e.info["numbers"] for e in rollouts if "numbers" in e.info]
    for name in dict.fromkeys(name for each in numbers for name in each):
        metrics[f"episode/{name}"] = float(np.mean([each[name] for each in numbers if name in each]))
    outcomes = [outcome for e in rollouts for outcome in e.info.get("outcomes", {}).values()]
    metrics["reward/timeouts"] = float(outcomes.count(TIMEOUT) + outcomes.count(LATE))
    return metrics


def domain_metrics(experiences: list[Experience], version: int) -> dict[str, float]:
    """Rewards, lengths and staleness of each domain in a batch, as domain/NAME/KEY.

    `groups` are those in the batch, `informative` the share of them whose rewards differ (with roles: those of some
    role), and `failed` the share of completions whose reward has no verdict.
    """
    by_domain: dict[str, list[Experience]] = {}
    for experience in experiences:
        if experience.source is ExperienceSource.ROLLOUT and REPLAYED not in experience.info:
            by_domain.setdefault(task_domain(experience.task_id), []).append(experience)
    metrics: dict[str, float] = {}
    for name, own in by_domain.items():
        rollouts = first_per_rollout(own)
        groups: dict[str, list[Experience]] = {}
        for each in rollouts:
            groups.setdefault(each.group, []).append(each)
        judged = [each.reward for each in rollouts if each.reward is not None]
        learned = [each for each in own if each.action_tokens]
        found: dict[str, float] = {
            "groups": len(groups),
            "completions": len(rollouts),
            "informative": float(np.mean([len(set(most_varied_rewards(group))) > 1 for group in groups.values()])),
            "failed": float(np.mean([each.reward is None for each in rollouts])),
            "length": float(np.mean([each.action_tokens for each in learned] or [0])),
            "staleness": float(np.mean([each.staleness(version) for each in learned] or [0])),
        }
        if judged:
            found["reward"] = float(np.mean(judged))
        metrics |= {f"domain/{name}/{key}": value for key, value in found.items()}
    return metrics


def role_metrics(experiences: list[Experience]) -> dict[str, float]:
    """Mean reward and number of rollouts of each role in a batch, as role/NAME/KEY; nothing without roles."""
    by_role: dict[str, list[Experience]] = {}
    for each in experiences:
        if each.source is ExperienceSource.ROLLOUT and REPLAYED not in each.info and each.role is not None:
            by_role.setdefault(each.role, []).append(each)
    metrics: dict[str, float] = {}
    for name, own in by_role.items():
        rollouts = first_per_rollout(own)
        metrics[f"role/{name}/completions"] = len(rollouts)
        if judged := [each.reward for each in rollouts if each.reward is not None]:
            metrics[f"role/{name}/reward"] = float(np.mean(judged))
    return metrics


def engine_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Counts of an engine in another process, between two readings."""
    return {f"engine/{key}": value for key in _ENGINE if (value := after.get(key, 0) - before.get(key, 0))}


def generation_metrics(before: Mapping[str, float], after: Mapping[str, float], generated: int) -> dict[str, float]:
    """For drafts and guesses: the share accepted of those tested, and the accepted share of all new tokens. For the
    prefix cache: the share of prompt tokens found in it. On a GPU: the share of decode steps that replayed a captured
    one, and the number of captures. For a KV cache with a limit: the completions that waited for memory, and the peak
    since the start in GiB."""
    metrics: dict[str, float] = {}
    for name in ("reuse", "guess"):
        tested, accepted = (
            after.get(f"{name}_{key}", 0) - before.get(f"{name}_{key}", 0) for key in ("tested", "accepted")
        )
        if tested:
            metrics[f"rollout/{name}/accepted"] = accepted / tested
            metrics[f"rollout/{name}/share"] = accepted / generated
    hits, queries = (after.get(key, 0) - before.get(key, 0) for key in ("prefix_cache_hits", "prefix_cache_queries"))
    if hits:
        metrics["rollout/prefix_cache/share"] = hits / queries
    steps, replays, captures = (
        after.get(key, 0) - before.get(key, 0) for key in ("decode_steps", "decode_replays", "decode_captures")
    )
    if steps and (replays or captures):
        metrics["rollout/captured/share"] = replays / steps
        metrics["rollout/captured/captures"] = captures
    if after.get("cache_peak"):
        metrics["rollout/cache/preemptions"] = after["preemptions"] - before.get("preemptions", 0)
        metrics["rollout/cache/peak_gb"] = after["cache_peak"] / 2**30
    return metrics


def seconds_of(spans: list[Span], kind: str) -> float:
    """Seconds of all spans of one kind."""
    return sum(span.ended - span.started for span in spans if span.kind == kind)


def judging_metrics(spans: list[Span]) -> dict[str, float]:
    """For every reward: mean seconds of scoring and of waiting for a worker, and the longest queue."""
    metrics: dict[str, float] = {}
    for kind in dict.fromkeys(span.kind for span in spans if span.kind.startswith(REWARD)):
        name, own_spans = kind.removeprefix(REWARD), [span for span in spans if span.kind == kind]
        metrics[f"judging/{name}/seconds"] = float(np.mean([span.ended - span.started for span in own_spans]))
        metrics[f"judging/{name}/queued"] = float(np.mean([span.started - span.requested for span in own_spans]))
        metrics[f"judging/{name}/waiting"] = float(max_queue_depth(own_spans))
    return metrics


def sum_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sum the metrics of several sets of environments and tools; seconds of a step are averaged."""
    total: Counter[str] = Counter()
    for each in metrics:
        total.update(each)
    if SECONDS in total:
        seconds = sum(each.get(SECONDS, 0.0) * each.get(STEPS, 0.0) for each in metrics)
        total[SECONDS] = seconds / max(total[STEPS], 1)  # type: ignore[assignment]
    return dict(total)
