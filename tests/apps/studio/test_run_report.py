from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_factory import evaluation_metrics, experience, make_run, rollouts, save_tokenizer, training_metrics

from rollmill.apps.studio.report.charts import Series, draw_line_chart, nice_ticks
from rollmill.apps.studio.report.run_report import write_report
from rollmill.apps.studio.report.timelines import phase_timeline, phase_totals
from rollmill.errors import ConfigError
from rollmill.trackers import MetricsLog, RolloutLog, write_summary


class Page(HTMLParser):
    """Collects the elements, attributes and text of a page, and checks that every element is closed."""

    VOID = ("meta", "input", "line", "path", "circle")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def tokens(self) -> list[tuple[str, str]]:
        """Class and data of every token of every completion."""
        return [(str(a["class"]), str(a["data-k"])) for _, a in self.elements if "data-k" in a]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


def test_the_page_is_whole_and_loads_nothing_from_elsewhere(run: Path) -> None:
    html = (run / "report.html").read_text()
    page = Page(html)
    assert not [a for _, a in page.elements if {"src", "href"} & set(a)]
    assert not re.search(r"https?:|@import|url\(", html)
    text = " ".join(page.text)
    assert "33.0 %" in text
    assert "100.0 %" in text
    for title in (
        *("Accuracy", "Reward", "Loss, stage sft", "Loss, stage rl", "KL", "Entropy", "Gradient norm", "Length"),
        *("Log-prob gap", "Policy drift", "Staleness", "Where the time went", "Highest rewards", "Lowest rewards"),
    ):
        assert title in page.text, title


def test_charts_carry_their_numbers_and_the_stage_boundary(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    charts = {a["aria-label"]: json.loads(str(a["data-hover"])) for _, a in page.elements if "data-hover" in a}
    assert charts["Accuracy"]["steps"] == list(range(0, 61, 5))
    assert charts["Accuracy"]["series"][0]["values"][:2] == ["0.05", "0.105"]
    assert charts["Reward"]["steps"] == list(range(21, 61))
    boundaries = [a for tag, a in page.elements if tag == "line" and a.get("class") == "stage"]
    assert len(boundaries) == 5  # accuracy, gradient norm, learning rate, entropy, throughput


def test_tokens_show_text_log_prob_version_and_advantage(run: Path) -> None:
    html = (run / "report.html").read_text()
    tokens = Page(html).tokens()
    assert tokens
    assert all(re.fullmatch(r"\d+\|\d+\|-?\d+\.\d{4}\|-?\d+\|-?\d\.\d{3}", about) for _, about in tokens)
    assert {kind.split()[1][0] for kind, _ in tokens} >= {"p", "a"}
    assert re.search(r'<span class="t a3 s\d" data-k="19\|33\|[^"]*\|0\.700">A</span>', html)  # "Add the ones" is right
    assert re.search(r'<span class="t a-4 s\d" data-k="19\|33\|[^"]*\|-0\.900">A</span>', html)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}\u2028"


def test_model_output_is_inert(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = HOSTILE.replace("\u2028", "")
    hostile = experience(rng, HOSTILE, 0, text, text, 1.0)
    hostile.reward_parts = {HOSTILE: 1.0, "other": None}
    RolloutLog(tmp_path / "rollouts").write(1, [hostile])
    MetricsLog(tmp_path / "metrics.jsonl").append(
        {
            "step": 1,
            "stage": HOSTILE,
            "loss": 1.0,
            "reward/mean": 0.5,
            f"reward/{HOSTILE}": 1.0,
            "reward/b": 1,
            "seconds/train": 1,
        }
    )
    write_summary(tmp_path, {"status": HOSTILE, "tokens_per_second": 5.0})
    (tmp_path / "config.yaml").write_text(f"name: {json.dumps(HOSTILE)}\n")
    save_tokenizer(tmp_path / "checkpoints" / "step-1")
    html = write_report(tmp_path).read_text()
    page = Page(html)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert not [name for _, a in page.elements for name in a if name.startswith("on")]
    assert "49" not in " ".join(page.text)
    spans = re.findall(r'<span class="t a\d s\d" data-k="[^"]*">([^<]*)</span>', html)
    assert (
        "".join(spans)
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&#34;", '"')
        .replace("&#39;", "'")
        .replace("&amp;", "&")
        == text
    )


def test_only_the_pages_own_script_may_run(run: Path) -> None:
    import base64
    import hashlib

    html = (run / "report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [str(a["content"]) for tag, a in Page(html).elements if "http-equiv" in a]
    assert f"script-src 'sha256-{digest}'" in policy.replace("&#43;", "+")
    assert policy.startswith("default-src 'none'")


def test_without_a_tokenizer_tokens_are_ids(tmp_path: Path) -> None:
    RolloutLog(tmp_path / "rollouts").write(1, rollouts(np.random.default_rng(0), 1))
    assert "&lt;33&gt;</span>" in write_report(tmp_path).read_text()


def test_a_run_that_has_barely_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert tmp_path.name in Page(write_report(tmp_path).read_text()).text
    MetricsLog(tmp_path / "metrics.jsonl").append(evaluation_metrics(0))
    page = Page(write_report(tmp_path).read_text())
    assert "Accuracy" in page.text
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path / "rollouts" if (tmp_path / "rollouts").is_dir() else _empty(tmp_path))


def _empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_experiences_nobody_judged_are_shown_all_the_same(tmp_path: Path) -> None:
    some = [experience(np.random.default_rng(0), f"t{i}", 0, "What?\n", "Yes.", None) for i in range(3)]
    RolloutLog(tmp_path / "rollouts").write(1, some)
    text = " ".join(Page(write_report(tmp_path).read_text()).text)
    assert "Last completions" in text
    assert "no reward" in text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [json.dumps(training_metrics(rng, 21 + step % 40) | {"step": step}) for step in range(1, 5001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert write_report(tmp_path).stat().st_size < 1_500_000


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_ticks_enclose_the_values_and_are_few(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(1e-9, ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack
    assert high - slack <= ticks[-1]
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))


def test_a_chart_skips_what_was_not_measured_and_breaks_at_stages() -> None:
    rows = [
        {"step": step, "stage": "a" if step < 4 else "b", "loss": None if step == 2 else float(step)}
        for step in range(1, 7)
    ]
    chart = draw_line_chart("Loss", "", [Series("loss", "loss"), Series("kl", "kl")], rows)
    assert chart is not None
    (line,) = chart.lines
    assert line.path.count("M") == 2
    assert json.loads(chart.hover)["steps"] == [1, 3, 4, 5, 6]
    assert [name for _, name in chart.boundaries] == ["b"]
    started = draw_line_chart("Loss", "", [Series("loss", "loss")], [{"step": 0, "loss": 1.0}, *rows])
    assert started is not None
    assert [name for _, name in started.boundaries] == ["b"]  # an evaluation before the first stage names none
    assert draw_line_chart("KL", "", [Series("kl", "kl")], rows) is None


def test_smoothing_follows_a_trend_without_lag() -> None:
    rows = [{"step": step, "stage": "a", "x": float(step)} for step in range(200)]
    chart = draw_line_chart("x", "", [Series("x", "x", smooth=True)], rows)
    assert chart is not None
    smooth, raw = (
        [float(point.split()[1]) for point in path[1:].split("L")]
        for path in (chart.lines[0].path, chart.lines[0].faint)
    )
    assert smooth[20:-20] == pytest.approx(raw[20:-20], abs=0.2)


def test_the_timeline_adds_up() -> None:
    rows = [
        {"step": 1, "stage": "a", "seconds/train": 1.0, "seconds/total": 1.5},
        {"step": 2, "stage": "b", "seconds/rollout": 2.0, "seconds/train": 1.0, "seconds/total": 3.0},
        {
            "step": 3,
            "stage": "b",
            "seconds/rollout": 1.0,
            "seconds/train": 1.0,
            "seconds/total": 2.0,
            "seconds/sync": 0.0,
        },
    ]
    assert phase_totals(rows) == {"rollout": 3.0, "train": 3.0, "other": 0.5}
    drawn = phase_timeline(rows)
    assert drawn["longest"] == 3.0
    assert [(stage["name"], len(stage["bars"])) for stage in drawn["stages"]] == [("a", 1), ("b", 2)]
    assert drawn["stages"][1]["bars"][0]["parts"] == [
        ("rollout", pytest.approx(200 / 3), 2.0),
        ("train", pytest.approx(100 / 3), 1.0),
    ]


def test_what_the_pipeline_did_is_drawn(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        log.append(
            {
                "step": step,
                "loss": 0.1,
                "raw/groups": 9.0 + step,
                "pipeline/group_variance/dropped": 8.0 * step,
                "pipeline/verify/dropped": 0.0,
                "pipeline/verify/changed": 3.0,
                "replay/groups": 2.0,
            }
        )
    log.close()
    text = " ".join(Page(write_report(tmp_path).read_text()).text)
    assert "Groups rolled out" in text
    assert "group_variance/dropped" in text
    assert "verify/changed" in text
    assert "verify/dropped" not in text
    assert "Age of replayed groups" not in text


def test_every_domain_has_its_curves(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        log.append(
            {"step": step, "stage": "rl", "loss": 0.1, "domain/math/groups": 3.0, "domain/math/reward": 0.5 * step}
            | {"tasks/math/share": 0.75, "tasks/code/share": 0.25, "tasks/code/paused": float(step == 2)}
            | ({"domain/code/groups": 1.0, "domain/code/reward": 0.125} if step == 1 else {})
            | {"eval/math/greedy": 0.25 * step, "eval/math/sampled": 0.2, "eval/code/greedy": 0.75}
        )
    log.close()
    page = Page(write_report(tmp_path).read_text())
    drawn = {str(a["aria-label"]): json.loads(str(a["data-hover"])) for _, a in page.elements if a.get("data-hover")}
    found = {
        title: {each["name"]: each["values"] for each in drawn[title]["series"]}
        for title in ("Reward by domain", "Accuracy by domain", "Share of the batch", "Pauses")
    }
    assert found == {
        "Reward by domain": {"code": ["0.125", None], "math": ["0.5", "1"]},
        "Accuracy by domain": {"code": ["0.75", "0.75"], "math": ["0.2", "0.2"]},
        "Share of the batch": {"code": ["0.25", "0"], "math": ["0.75", "1"]},
        "Pauses": {"code": ["0", "1"]},
    }


def test_a_run_without_domains_has_no_charts_of_them(run: Path) -> None:
    assert "by domain" not in (run / "report.html").read_text()
