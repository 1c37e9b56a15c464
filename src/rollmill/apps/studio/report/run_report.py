"""Renders report.html: a run in one self-contained page, without external scripts, fonts or images."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rollmill.apps.studio.report.charts as charts
from rollmill.apps.studio.report.charts import LineChart, MetricsRow, Series
from rollmill.apps.studio.report.metric_charts import domain_charts, evaluation_charts
from rollmill.apps.studio.report.pictures import Thumbnail, draw_thumbnails
from rollmill.apps.studio.report.timelines import (
    LEFT,
    PHASES,
    WIDTH,
    StepTimeline,
    draw_step_timeline,
    phase_timeline,
    phase_totals,
    seconds_by_stage,
)
from rollmill.config.yaml_file import read_plain_yaml
from rollmill.files import atomic_write
from rollmill.trackers.console import format_duration, format_metric
from rollmill.trackers.eval_metrics import eval_sets_in, first_accuracy, has_evaluation
from rollmill.trackers.event_log import STUCK, read_events
from rollmill.trackers.metrics_log import is_finite_number, read_metrics, read_summary
from rollmill.trackers.rollout_log import check_run_dir, load_experiences, stored_steps
from rollmill.trackers.step_timeline import read_step_timelines
from rollmill.trackers.token_texts import Decoder, advantage_levels, load_decoder, surprise_levels, token_texts
from rollmill.types import Experience

_NO_DETAILS = ("time", "event", "step", "before", "explorers")
"""Keys of events that are shown elsewhere, or that their text repeats."""


REPORT_FILE = "report.html"

_NO_PARTS = ("reward/mean", "reward/std", "reward/timeouts")
_LAST_STEPS = 3
_COMPLETIONS = 4
_MOST_PROMPT_TOKENS, _MOST_TOKENS = 150, 500


def write_report(run_dir: Path | str) -> Path:
    """Write RUN/report.html from the files of the run directory, and return its path.

    Raises ConfigError if `run_dir` is not a run directory, RollmillError if a file in it is damaged.
    """
    run = check_run_dir(run_dir)
    environment = _templates()
    script = environment.get_template("report.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    context = _context(run) | {"script": Markup(script), "script_hash": digest, "geometry": charts}
    page = environment.get_template("report.html.j2").render(context)
    path = run / REPORT_FILE
    atomic_write(path, page.encode("utf-8", "backslashreplace"))
    return path


@cache
def _templates() -> Environment:
    """The templates, compiled once per process: a run writes its report again and again."""
    environment = Environment(
        loader=PackageLoader("rollmill.apps.studio.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"number": format_metric, "seconds": format_duration, "axis": charts.format_tick}
    return environment


@dataclass
class ReportToken:
    """A token on the page. `about` has the fields of its tooltip, separated by |."""

    text: str
    kind: str
    about: str


@dataclass
class ReportSample:
    """A completion on the page."""

    experience: Experience
    tokens: list[ReportToken]
    left_out: int
    pictures: list[Thumbnail]


def _context(run: Path) -> dict[str, Any]:
    rows, summary = read_metrics(run), read_summary(run)
    steps = [row for row in rows if "seconds/total" in row or "loss" in row]
    config_file = run / "config.yaml"
    config = config_file.read_text(encoding="utf-8") if config_file.is_file() else ""
    settings = read_plain_yaml(config_file) if config else {}
    return {
        "name": str(settings.get("name") or run.resolve().name),
        "settings": _settings(settings),
        "events": [_event(row) for row in read_events(run)],
        "stuck": [f"step {row.get('step')}: {row.get('text')}" for row in read_events(run, STUCK)],
        "summary": summary,
        "stage_seconds": summary.get("seconds_by_stage") or seconds_by_stage(steps),
        "steps": steps,
        "tokens": sum(row.get("tokens") or 0 for row in steps),
        "completions": sum(row.get("completions") or 0 for row in steps),
        "evaluations": [row for row in rows if has_evaluation(row)],
        "evaluated": [(name, what) for name, measures in eval_sets_in(rows).items() for what in measures],
        "accuracy": _accuracy(rows, summary),
        "sections": _sections(rows, steps),
        "timeline": phase_timeline(steps),
        "phase_totals": phase_totals(steps),
        "phases": PHASES,
        "one_step": _one_step(run),
        "step_left": LEFT,
        "step_width": WIDTH,
        "chosen": _completions(run),
        "config": config,
    }


def _one_step(run: Path) -> StepTimeline | None:
    """Timeline of the last recorded step."""
    steps = read_step_timelines(run)
    return draw_step_timeline(steps[max(steps)], PHASES) if steps else None


def _settings(settings: dict[str, Any]) -> list[str]:
    stages = settings.get("stages") or [settings]
    algorithms = [str((stage.get("algorithm") or settings.get("algorithm") or {}).get("name", "")) for stage in stages]
    model = str((settings.get("model") or {}).get("path", ""))
    return [part for part in (model and f"model {model}", " then ".join(filter(None, algorithms))) if part]


def _event(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Time, kind, step and details of an event."""
    when = datetime.fromtimestamp(row["time"]).isoformat(" ", "seconds")
    details = {key: value for key, value in row.items() if key not in _NO_DETAILS}
    texts = [", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in details.values()]
    return when, str(row["event"]), str(row.get("step", "")), "; ".join(texts)


def _accuracy(rows: Sequence[MetricsRow], summary: dict[str, Any]) -> tuple[float, float] | None:
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if before is None or after is None:
        values = [value for row in rows if (value := first_accuracy(row, ("greedy", "sampled"))) is not None]
        if not values:
            return None
        before, after = values[0], values[-1]
    return float(before), float(after)


def _sections(rows: Sequence[MetricsRow], steps: Sequence[MetricsRow]) -> list[tuple[str, list[LineChart]]]:
    keys = sorted({key for row in steps for key in row})
    parts = [key for key in keys if key.startswith("reward/") and key not in _NO_PARTS]
    terms = [key for key in keys if key.startswith("loss/")]
    learning = [
        charts.draw_line_chart(
            "Reward", "Mean of a batch, ± one standard deviation", [_mean("reward", "reward/std")], steps
        ),
        _several("Reward parts", "Means before weighting", parts, steps),
    ]
    optimisation = [
        *_losses(steps),
        _several("Loss terms", "What the loss is the sum of", terms, steps),
        _single("Gradient norm", "Before clipping", "grad_norm", steps),
        _single("Learning rate", "Of the optimizer step", "lr", steps),
        _single("Clipped tokens", "Share with a clipped ratio", "ratio/clip_fraction", steps),
    ]
    policy = [
        _single("KL", "From rollout policy to trained policy, per token", "kl", steps),
        _single("KL to the initial policy", "Per token, where it is in the loss", "kl_ref", steps),
        _single("Entropy", "Of the policy, nats per token", "entropy", steps),
        charts.draw_line_chart("Length", "Tokens per completion", [_mean("length")], steps, 0.0),
        _extremes("Log-prob gap", "Engine against trainer with the same weights, per token", "logprob_gap", steps),
        _extremes("Policy drift", "Rollout against the policy that learns from it, per token", "policy_drift", steps),
        _extremes("Staleness", "Versions between rollout and update", "staleness", steps),
        _single("Throughput", "Tokens per second", "tokens_per_second", steps),
        *_memory(keys, steps),
    ]
    data = _data(keys, steps)
    sections = (
        ("Evaluation", evaluation_charts(rows)),
        ("Domains", domain_charts(rows)),
        ("Learning", learning),
        ("Data", data),
        ("Optimisation", optimisation),
        ("Policy and speed", policy),
    )
    drawn = [(title, [chart for chart in some if chart is not None]) for title, some in sections]
    return [(title, some) for title, some in drawn if some]


def _data(keys: Sequence[str], steps: Sequence[MetricsRow]) -> list[LineChart | None]:
    """Charts of the data before the trainer: pipeline, replay, sampler."""
    dropped = [key for key in keys if key.startswith("pipeline/") and key.endswith("/dropped")]
    changed = [key for key in keys if key.startswith("pipeline/") and key.endswith(("/changed", "/added"))]
    moved = [[key for key in some if any(row.get(key) for row in steps)] for some in (dropped, changed)]
    tasks = [key for key in keys if key.startswith("tasks/") and not key.endswith("/paused")]
    return [
        _single("Groups rolled out", "Per step, those that the pipeline drops included", "raw/groups", steps),
        _lines("Dropped", "Completions, by operator", moved[0], steps),
        _lines("Changed and added", "Experiences, by operator", moved[1], steps),
        _single("Replayed groups", "Per step", "replay/groups", steps),
        _single("Age of replayed groups", "Mean versions since their oldest token", "replay/age", steps),
        _several("Tasks", "What the sampler knows", tasks, steps),
    ]


def _memory(keys: Sequence[str], steps: Sequence[MetricsRow]) -> list[LineChart | None]:
    """Charts of memory and offloading between phases."""
    phases = [key for key in keys if key.startswith("memory/")]
    moves = [key for key in keys if key.startswith("residency/") and key.endswith("/seconds")]
    return [
        _lines("Memory", "Peak of each phase, GB", phases, steps),
        _lines("Moves", "Seconds per step, by component", moves, steps),
    ]


def _lines(title: str, caption: str, keys: Sequence[str], rows: Sequence[MetricsRow]) -> LineChart | None:
    if not keys:
        return None
    lines = [Series(key, key.split("/", 1)[1], smooth=True) for key in keys]
    return charts.draw_line_chart(title if len(keys) > 1 else f"{title}: {lines[0].name}", caption, lines, rows, 0.0)


def _mean(of: str, spread: str = "") -> Series:
    return Series(f"{of}/mean", f"mean {of}", spread=spread, smooth=True)


def _single(title: str, caption: str, key: str, rows: Sequence[MetricsRow]) -> LineChart | None:
    return charts.draw_line_chart(title, caption, [Series(key, title.lower(), smooth=True)], rows, 0.0)


def _several(title: str, caption: str, keys: Sequence[str], rows: Sequence[MetricsRow]) -> LineChart | None:
    if len(keys) < 2:
        return None
    return charts.draw_line_chart(
        title, caption, [Series(key, key.split("/", 1)[1], smooth=True) for key in keys], rows
    )


def _extremes(title: str, caption: str, key: str, rows: Sequence[MetricsRow]) -> LineChart | None:
    return charts.draw_line_chart(
        title, caption, [Series(f"{key}/mean", "mean"), Series(f"{key}/max", "max")], rows, 0.0
    )


def _losses(rows: Sequence[MetricsRow]) -> list[LineChart | None]:
    """One chart per stage: losses of different algorithms share no scale."""
    stages = dict.fromkeys(row.get("stage") for row in rows)
    return [
        charts.draw_line_chart(
            "Loss" if len(stages) == 1 else f"Loss, stage {stage}",
            "Per optimizer step",
            [Series("loss", "loss", smooth=True)],
            [row for row in rows if row.get("stage") == stage],
        )
        for stage in stages
    ]


def _completions(run: Path) -> list[tuple[str, list[ReportSample]]]:
    """Highest and lowest rewards of the last stored steps, one completion per group; the last ones without rewards."""
    recent = [one for step in stored_steps(run)[-_LAST_STEPS:] for one in load_experiences(run, step)]
    decode = load_decoder(run)
    judged = [one for one in recent if one.reward is not None and is_finite_number(one.reward)]
    if not judged:
        return [("Last completions", [_shown(one, decode) for one in recent[-_COMPLETIONS:]])] if recent else []
    ranked = sorted(judged, key=lambda one: -(one.reward or 0.0))
    best = _one_per_group(ranked)
    worst = _one_per_group([one for one in reversed(ranked) if one.reward != ranked[0].reward])
    chosen = (("Highest rewards", best), ("Lowest rewards", worst))
    return [(title, [_shown(one, decode) for one in some]) for title, some in chosen if some]


def _one_per_group(experiences: Sequence[Experience]) -> list[Experience]:
    first = {one.group: one for one in reversed(experiences)}
    return [one for one in experiences if first[one.group] is one][:_COMPLETIONS]


def _shown(experience: Experience, decode: Decoder | None) -> ReportSample:
    texts = token_texts(experience, decode)
    advantages, surprises = advantage_levels(experience), surprise_levels(experience)
    tokens = []
    for t, text in enumerate(texts):
        kind = f"a{advantages[t]} s{surprises[t]}" if experience.action_mask[t] else "p"
        advantage = "" if experience.advantage is None else f"{experience.advantage[t]:.3f}"
        tokens.append(
            ReportToken(
                text,
                kind,
                f"{t}|{experience.token_ids[t]}|{experience.logprobs[t]:.4f}|{experience.versions[t]}|{advantage}",
            )
        )
    begin = int(experience.action_mask.argmax()) if experience.action_mask.any() else len(tokens)
    kept = tokens[max(0, begin - _MOST_PROMPT_TOKENS) : begin + _MOST_TOKENS]
    return ReportSample(experience, kept, len(tokens) - len(kept), draw_thumbnails(experience))
