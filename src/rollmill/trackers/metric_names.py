"""Names that other frameworks give to rollmill's metrics, so that runs of both stand in one chart of a tracker.

A metric is listed where both numbers measure the same. Sources: TRL 1.16 (`grpo_trainer.py`, `dpo_trainer.py`, with the
prefix `train/` that the trackers of transformers add) and verl (`trainer/ppo/metric_utils.py` and its actor and critic
workers). Our spreads divide by n, TRL's by n - 1; verl counts prompts among its tokens, so no rate of tokens is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from rollmill.trackers.metrics_log import Metric, Metrics

MetricNames = Literal["rollmill", "trl", "verl"]

_TRL: dict[str, tuple[str, ...]] = {
    "step": ("train/global_step",),
    "loss": ("train/loss",),
    "grad_norm": ("train/grad_norm",),
    "lr": ("train/learning_rate",),
    "entropy": ("train/entropy",),
    "kl_ref": ("train/kl",),
    "reward/mean": ("train/reward",),
    "reward/std": ("train/reward_std",),
    "length/mean": ("train/completions/mean_length",),
    "length/max": ("train/completions/max_length",),
    "length/truncated": ("train/completions/clipped_ratio",),
    "ratio/clip_fraction": ("train/clip_ratio/region_mean",),
    "policy_drift/mean": ("train/sampling/sampling_logp_difference/mean",),
    "policy_drift/max": ("train/sampling/sampling_logp_difference/max",),
    "pairs/accuracy": ("train/rewards/accuracies",),
    "pairs/margin": ("train/rewards/margins",),
    "pairs/chosen": ("train/rewards/chosen",),
    "pairs/rejected": ("train/rewards/rejected",),
    "seconds/total": ("train/step_time",),
}
_VERL: dict[str, tuple[str, ...]] = {
    "step": ("training/global_step",),
    "loss/policy": ("actor/pg_loss",),
    "grad_norm": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    "entropy": ("actor/entropy",),
    "kl_ref": ("actor/kl_loss",),
    "ratio/clip_fraction": ("actor/pg_clipfrac",),
    "reward/mean": ("critic/score/mean", "critic/rewards/mean"),
    "value/loss": ("critic/vf_loss",),
    "value/grad_norm": ("critic/grad_norm",),
    "value/mean": ("critic/values/mean",),
    "value/explained_variance": ("critic/vf_explained_var",),
    "length/mean": ("response_length/mean",),
    "length/max": ("response_length/max",),
    "length/truncated": ("response_length/clip_ratio",),
    "episode/turns": ("num_turns/mean",),
    "seconds/rollout": ("timing_s/gen",),
    "seconds/reward": ("timing_s/reward",),
    "seconds/train": ("timing_s/update_actor",),
    "seconds/eval": ("timing_s/testing",),
    "seconds/checkpoint": ("timing_s/save_checkpoint",),
    "seconds/total": ("timing_s/step", "perf/time_per_step"),
}

_NO_PART = {"reward/mean", "reward/std", "reward/timeouts"}
_PART = re.compile(r"reward/([^/]+)")
_HELD_OUT = re.compile(r"eval/(?:(.+)/)?(mean|maj|pass)@(\d+)")


def add_names(metrics: Metrics, names: MetricNames) -> Metrics:
    """Return the metrics with those that another framework has under its name added; ours stay."""
    if names == "rollmill":
        return metrics
    table, pattern = _TABLES[names]
    added: dict[str, Metric] = {}
    for ours, value in metrics.items():
        for theirs in table.get(ours, ()) or pattern(ours):
            added[theirs] = value
    return {**metrics, **added}


def other_names(names: MetricNames) -> dict[str, tuple[str, ...]]:
    """Return the table of a framework: our name, and its names for the same number; patterns have NAME, N and K."""
    if names == "trl":
        return {**_TRL, "reward/NAME": ("train/rewards/NAME/mean",)}
    if names == "verl":
        held_out = {
            f"eval/NAME/{ours}": (f"val-core/NAME/acc/{theirs}",)
            for ours, theirs in (("mean@N", "mean@N"), ("maj@K", "maj@K/mean"), ("pass@K", "best@K/mean"))
        }
        return {**_VERL, **held_out}
    return {}


def _reward_part(name: str) -> tuple[str, ...]:
    found = None if name in _NO_PART else _PART.fullmatch(name)
    return () if found is None else (f"train/rewards/{found[1]}/mean",)


def _held_out(name: str) -> tuple[str, ...]:
    found = _HELD_OUT.fullmatch(name)
    if found is None:
        return ()
    kind = {"mean": "mean@{}", "maj": "maj@{}/mean", "pass": "best@{}/mean"}[found[2]].format(found[3])
    return (f"val-core/{found[1] or 'test'}/acc/{kind}",)


_TABLES: dict[str, tuple[dict[str, tuple[str, ...]], Callable[[str], tuple[str, ...]]]] = {
    "trl": (_TRL, _reward_part),
    "verl": (_VERL, _held_out),
}
