from __future__ import annotations

import io
import os
import pty
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.run_factory import evaluation_metrics, rollouts, training_metrics

from rollmill.trackers.console import RunProgress, format_duration, format_metric, one_line, printable
from rollmill.trackers.live_console import LiveView, sparkline
from rollmill.trackers.run_views import PlainView, make_view

STAGES = [("sft", 20), ("rl", 40)]


def live(width: int = 100) -> tuple[LiveView, Console]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=50, color_system=None)
    return LiveView(2, console=console), console


def screen(view: LiveView, console: Console) -> str:
    paper = Console(file=io.StringIO(), width=console.width, height=50, color_system=None)
    paper.print(view.render())
    return paper.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_plain_lines_are_stable_and_easy_to_grep() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    view.start("demo", [("rl", 30)])
    view.step(
        {
            "step": 12,
            "stage": "rl",
            "reward/mean": 0.53125,
            "loss": 0.01234,
            "kl": None,
            "eval/greedy": 0.75,
            "tokens_per_second": 812.4,
            "seconds/total": 0.618,
        },
        [],
    )
    view.evaluation({"step": 12, "stage": "rl", "eval/greedy": 0.75, "eval/sampled": 0.6875})
    view.close()
    assert stream.getvalue().splitlines() == [
        "run demo: rl (30 steps)",
        "step 12/30 stage=rl reward=0.531 eval/greedy=0.750 kl=nan loss=0.0123 812 tok/s 0.62 s",
        "eval 12/30 stage=rl eval/greedy=0.750 eval/sampled=0.688",
    ]


def test_the_loss_leads_where_nothing_else_says_how_well_a_step_went() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    view.start("demo", [("sft", 1), ("dpo", 3)])
    view.step({"step": 1, "stage": "sft", "loss": 1.25, "grad_norm": 0.5}, [])
    view.step({"step": 2, "stage": "dpo", "loss": 0.5, "pairs/accuracy": 0.75}, [])
    assert stream.getvalue().splitlines()[1:] == [
        "step 1/4 stage=sft loss=1.250 grad_norm=0.500",
        "step 2/4 stage=dpo accuracy=0.750 loss=0.500",
    ]


def test_plain_view_writes_what_the_stream_can_hold_and_no_terminal_codes() -> None:
    raw = io.BytesIO()
    view = PlainView(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    view.message("é \x1b[31mred \ud800")
    assert raw.getvalue() == b"\\xe9 \\x1b[31mred \\ud800\n"


def test_make_view_picks_by_terminal() -> None:
    assert isinstance(make_view(1, io.StringIO()), PlainView)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        assert isinstance(make_view(1, terminal), LiveView)
    os.close(master)


def test_the_live_view_shows_where_the_run_is() -> None:
    rng = np.random.default_rng(0)
    view, console = live()
    view.start("demo", STAGES)
    view.evaluation(evaluation_metrics(0))
    for step in range(1, 26):
        accuracy = {"eval/greedy": 0.15, "eval/sampled": 0.125, "eval/sampled_low": 0.05, "eval/sampled_high": 0.25}
        view.step(training_metrics(rng, step) | (accuracy if step == 10 else {}), rollouts(rng, step))
    view.message("checkpoint written")
    shown = screen(view, console)
    view.close()
    for expected in ("demo", "stage 2/2 rl", "step 5/40", "reward", "accuracy", "tok/s", "tokens, ended by eos"):
        assert expected in shown, expected
    assert re.search(r"rollout 0\.\d\d s", shown)
    assert re.search("[▁▂▃▄▅▆▇█]{5}", shown)
    above = console.file.getvalue()  # type: ignore[attr-defined]
    assert "checkpoint written" in above
    assert "evaluation after step 0: greedy" in above
    assert "evaluation after step 10: greedy 15.0 % sampled 12.5 % (5.0 % to 25.0 %)" in above


def test_model_output_is_shown_literally() -> None:
    rng = np.random.default_rng(0)
    view, console = live()
    view.start("[red]run[/red]", [("[b]rl[/b]", 40)])
    sample = rollouts(rng, 3, tasks=1, group=1)[0]
    sample.prompt = "[link=file:///etc]x[/link] \x1b]0;title\x07"
    sample.response = "[bold]strong[/bold] [/nonsense] \x1b[2J :smiley:"
    view.step(training_metrics(rng, 30), [sample])
    view.message("[red]message[/red] \x1b[2J")
    shown = screen(view, console)
    view.close()
    for literal in (
        "[bold]strong[/bold] [/nonsense] \\x1b[2J :smiley:",
        "[link=file:///etc]x[/link] \\x1b]0;title\\x07",
    ):
        assert literal in shown
    assert "[red]run[/red]" in shown
    assert "[b]rl[/b]" in shown
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]message[/red] \\x1b[2J" in written
    assert "\x1b[2J" not in written
    assert "\x1b]0" not in written


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_live_view_fits_any_terminal(width: int) -> None:
    rng = np.random.default_rng(0)
    view, console = live(width)
    view.start("demo", STAGES)
    view.step(training_metrics(rng, 30), rollouts(rng, 30))
    shown = screen(view, console)
    view.close()
    assert max(map(len, shown.splitlines())) <= width


def test_samples_come_from_different_groups() -> None:
    rng = np.random.default_rng(0)
    view, console = live()
    view.start("demo", [("rl", 40)])
    some = rollouts(rng, 30)
    view.step(training_metrics(rng, 30), some)
    shown = screen(view, console)
    view.close()
    for index, visible in ((0, True), (3, True), (6, False)):  # three completions a group, two samples
        assert (some[index].prompt.strip() in shown) is visible


def test_a_resumed_view_goes_on_where_the_run_stopped() -> None:
    rng = np.random.default_rng(0)
    history = [training_metrics(rng, step) for step in range(1, 26)]
    stream = io.StringIO()
    plain = PlainView(stream)
    plain.start("demo", STAGES)
    plain.resume(history)
    plain.step(training_metrics(rng, 26), [])
    lines = stream.getvalue().splitlines()
    assert lines[1] == "resumed after step 25"
    assert lines[2].startswith("step 26/60 stage=rl ")
    view, console = live()
    view.start("demo", STAGES)
    view.resume(history)
    shown = screen(view, console)
    view.close()
    assert "step 5/40" in shown
    assert "stage ends in" in shown


def test_progress_counts_a_stage_that_ended_early() -> None:
    progress = RunProgress(STAGES)
    for step in range(1, 13):
        progress.update({"step": step, "stage": "sft", "seconds/total": 1.0})
    assert (progress.stage, progress.step, progress.total) == ("sft", 12, 60)
    assert progress.seconds_left == pytest.approx(8.0)
    progress.update({"step": 13, "stage": "rl", "seconds/total": 2.0})
    assert (progress.stage, progress.stage_step, progress.stage_total, progress.total) == ("rl", 1, 40, 52)
    assert progress.seconds_left == pytest.approx(78.0)


def test_progress_tells_stages_of_one_name_apart_by_their_steps() -> None:
    progress = RunProgress([("train", 2), ("train", 3)])
    for step in range(1, 4):
        progress.update({"step": step, "stage": "train"})
    assert (progress.index, progress.stage_step, progress.total) == (1, 1, 5)


@given(st.lists(st.none() | st.floats(-1e9, 1e9), max_size=50), st.integers(1, 30))
def test_sparkline_has_one_character_per_value(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    shown = [value for value in values[-width:] if value is not None]
    if shown and max(shown) > min(shown):
        assert {"▁", "█"} <= set(line)


def test_numbers_and_durations_read_well() -> None:
    numbers = [0.0, 0.53125, 0.0123456, 5e-05, 123.456, 12345.6, 7, None]
    assert list(map(format_metric, numbers)) == ["0.000", "0.531", "0.0123", "5e-05", "123.456", "1.23e+04", "7", "nan"]
    seconds = [0.031, 8.26, 59.96, 125.4, 4320.0]
    assert list(map(format_duration, seconds)) == ["0.03 s", "8.3 s", "1 min 00 s", "2 min 05 s", "1 h 12 min"]


@given(st.text(st.characters(exclude_categories=[])))
def test_printable_text_steers_no_terminal(text: str) -> None:
    shown = printable(text)
    assert not set(shown) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E)}
    shown.encode("utf-8")
    assert len(one_line(text, 20)) <= 20
    assert "\n" not in one_line(text, 20)


def domain_rows() -> list[dict[str, float | int | str | None]]:
    """Metrics of a stage without domains and of one with two, of which one is paused in the end."""
    rows: list[dict[str, float | int | str | None]] = [
        {"step": 1, "stage": "sft", "loss": 1.0, "tasks/easy/share": 1.0},
        {"step": 1, "stage": "rl", "eval/math/greedy": 0.5, "eval/math/sampled": 0.25, "eval/code/greedy": 0.75},
    ]
    for step, reward in ((2, 0.25), (3, 0.5)):
        rows.append({"step": step, "stage": "rl", "reward/mean": 0.5, "tasks/math/share": 0.5, "tasks/code/share": 0.5})
        rows[-1] |= {"domain/math/groups": 3.0, "domain/math/reward": reward}
    rows[2] |= {"domain/code/groups": 1.0, "domain/code/reward": 1.0}
    rows[3]["tasks/code/paused"] = 1.0
    return rows


def test_a_plain_view_has_a_line_per_domain() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    view.start("demo", [("sft", 1), ("rl", 2)])
    for row in domain_rows():
        if "eval/math/greedy" in row:
            view.evaluation(row)
        else:
            view.step(row, [])
    assert [line for line in stream.getvalue().splitlines() if line.startswith("domain ")] == [
        "domain 2/3 name=math reward=0.250 share=0.750",
        "domain 2/3 name=code reward=1.000 share=0.250",
        "domain 3/3 name=math reward=0.500 share=1.000",
        "domain 3/3 name=code reward=1.000 share=0.000 paused",
    ]


def test_the_live_view_has_a_line_per_domain() -> None:
    view, console = live()
    view.start("demo", [("sft", 1), ("rl", 2)])
    rows = domain_rows()
    view.resume(rows[:-1])
    view.step(rows[-1], [])
    shown = {line.split()[1]: line.split()[2:-1] for line in screen(view, console).splitlines() if "the batch" in line}
    view.close()
    assert shown == {
        "math": ["▁█", "0.500", "100.0", "%", "of", "the", "batch", "accuracy", "25.0", "%"],
        "code": ["▁", "1.000", "0.0", "%", "of", "the", "batch", "accuracy", "75.0", "%", "paused"],
    }
