"""Summary of `rollmill grade`: counts, means and seconds, as one object or as tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.rewards import RewardResult


def summarize_judgements(name: str, results: list[RewardResult]) -> dict[str, Any]:
    """Return counts, the mean reward of the scored lines, outcomes, and the median and 99th percentile of seconds.

    `parts` has the count and mean of every part, `details` the mean of every detail, `rewards` the outcomes and working
    seconds of every reward.
    """
    totals = [result.reward for result in results if result.reward is not None]
    parts = dict.fromkeys(part for each in results for part in each.parts)
    rewards = dict.fromkeys(reward for each in results for reward in each.outcomes)
    details: dict[str, list[float]] = {}
    for key, value in (item for result in results for item in result.details.items()):
        details.setdefault(key, []).append(value)
    return {
        "reward": name,
        "count": len(results),
        "judged": len(totals),
        "mean": _mean(totals),
        "outcomes": dict(Counter(outcome for each in results for outcome in each.outcomes.values())),
        "details": {key: _mean(values) for key, values in sorted(details.items())},
        **_percentiles([result.seconds for result in results]),
        "parts": {part: _of_part([each.parts.get(part) for each in results]) for part in parts},
        "rewards": {reward: _of_reward(reward, results) for reward in rewards},
    }


def _of_part(values: list[float | None]) -> dict[str, Any]:
    given = [value for value in values if value is not None]
    return {"judged": len(given), "mean": _mean(given)}


def _of_reward(name: str, results: list[RewardResult]) -> dict[str, Any]:
    spans = [each.spans[name] for each in results if name in each.spans]
    outcomes = Counter(each.outcomes[name] for each in results if name in each.outcomes)
    return {"outcomes": dict(outcomes), **_percentiles([span.ended - span.started for span in spans] or [0.0])}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "seconds_p50": ordered[len(ordered) // 2],
        "seconds_p99": ordered[min(last, len(ordered) * 99 // 100)],
    }


def print_summary_tables(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    table = Table("reward", summary["reward"])
    table.add_row("judged", f"{summary['judged']} of {summary['count']}")
    table.add_row("mean", _shown(summary["mean"]))
    for key, mean in summary["details"].items():
        table.add_row(key, _shown(mean))
    for outcome, count in summary["outcomes"].items():
        table.add_row(f"outcome {outcome}", str(count))
    for key, value in summary.get("counters", {}).items():
        table.add_row(key, f"{value:g}")
    table.add_row("seconds p50 / p99", f"{summary['seconds_p50']:.4f} / {summary['seconds_p99']:.4f}")
    console.print(table)
    if len(summary["parts"]) > 1:
        table = Table("part", "judged", "mean")
        for part, found in summary["parts"].items():
            table.add_row(part, str(found["judged"]), _shown(found["mean"]))
        console.print(table)
    if len(summary["rewards"]) > 1:
        table = Table("reward", "outcomes", "seconds p50 / p99")
        for name, found in summary["rewards"].items():
            outcomes = ", ".join(f"{outcome} {count}" for outcome, count in found["outcomes"].items())
            table.add_row(name, outcomes, f"{found['seconds_p50']:.4f} / {found['seconds_p99']:.4f}")
        console.print(table)


def _shown(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.4f}"
