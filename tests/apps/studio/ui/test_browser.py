"""The pages in a real browser: runs that are live, killed, compared, of an agent; keys, small screens, hostile texts.

With ROLLMILL_SCREENSHOTS the pictures are left in that folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from support import feedback_runs
from support.browser import nameless_controls, watched
from support.feedback_runs import completion
from support.ui_runs import ServedRuns, activities, config, killed_run, make_run, served, step_row

from rollmill.apps.studio.feedback import open_feedback
from rollmill.data.images import make_image_ref
from rollmill.trackers.heartbeat import keep_heartbeat
from rollmill.trackers.metrics_log import MetricsLog
from rollmill.trackers.rollout_log import RolloutLog

pytestmark = pytest.mark.service

PAGES = {
    "runs": "#/runs",
    "curves": "#/curves?run=one&run=two",
    "overview": "#/run?run=killed",
    "rollouts": "#/run?run=one&tab=rollouts",
    "task": "#/run?run=one&tab=rollouts&task=apples/1",
    "timeline": "#/run?run=one&tab=timeline",
    "pipeline": "#/run?run=one&tab=pipeline",
    "checkpoints": "#/run?run=one&tab=checkpoints",
    "config": "#/run?run=one&tab=config",
    "compare": "#/compare?a=one&b=two",
}
WIDE, SMALL = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "</pre></title></style><img src=x onerror='window.pwned = 1'>",
    '"><svg onload="window.pwned = 1">',
    "${window.pwned = 1} {{ 7 * 7 }} `",
    "javascript:window.pwned=1",
    "\x1b[2J\x07 and \x00",
    "safe \u202etxt.exe\u2066 \u200b\ufeff",
    "&lt;b&gt; &amp; \ud800",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRuns]:
    folder = tmp_path_factory.mktemp("runs")
    activities(make_run(folder / "one", 30), 30)
    make_run(folder / "two", 30, seed=1, gain=0.01, max_staleness=1)
    killed_run(folder / "killed")
    make_run(folder / "live", 12, seed=2)
    with served(folder) as running:
        yield running


@pytest.fixture
def page(browser: Browser, site: ServedRuns) -> Iterator[Page]:
    """A page whose errors, and requests for other places, are the test's."""
    with watched(browser, site.address, viewport=WIDE) as opened:
        yield opened


@pytest.fixture
def small(browser: Browser, site: ServedRuns) -> Iterator[Page]:
    with watched(browser, site.address, viewport=SMALL) as opened:
        yield opened


def settle(page: Page) -> None:
    """Wait until nothing is being read or drawn."""
    expect(page.locator("h1")).to_have_count(1)
    expect(page.locator(".loading, .stale")).to_have_count(0)


def picture(page: Page, name: str, tmp_path: Path) -> None:
    settle(page)
    folder = Path(os.environ.get("ROLLMILL_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"{name}.png")


def test_a_live_run_is_followed(page: Page, site: ServedRuns, tmp_path: Path) -> None:
    """The state, and the last value of a curve, change without a reload."""
    run, rng = site.folder / "live", np.random.default_rng(5)
    log = MetricsLog(run / "metrics.jsonl")
    with keep_heartbeat(run, "trainer") as heartbeat:
        heartbeat.set_activity("train, step 13", version=12)
        page.goto("/")
        row = page.locator("tbody tr", has_text="live")
        expect(row.locator(".badge")).to_have_text("running")
        expect(row).to_contain_text("12 / 40")
        row.get_by_role("link", name="live").click()
        page.get_by_role("tab", name="Curves").click()
        chart = page.locator(".chart", has_text="reward/mean")
        expect(chart.locator("canvas")).to_have_count(1)
        for step in (13, 14):
            log.append(step_row(step, rng) | {"reward/mean": 0.123 * step})
        expect(chart.locator(".legend b")).to_have_text("1.722")
        picture(page, "live", tmp_path)
        page.get_by_role("tab", name="Overview").click()
        expect(page.locator("tbody tr", has_text="trainer")).to_contain_text("train, step 13")
    expect(page.locator("h1 .badge")).to_have_text("done")
    log.close()


def test_a_killed_run_says_what_happened(page: Page, tmp_path: Path) -> None:
    page.goto("/#/run?run=killed")
    expect(page.locator("h1 .badge")).to_have_text("killed")
    events = page.locator(".events li")
    expect(events).to_have_count(3)
    assert "the engine's process ended with exit code 137" in events.nth(2).inner_text()
    assert "gone" in page.locator("tbody tr", has_text="trainer").inner_text()
    picture(page, "killed", tmp_path)


def test_curves_of_two_runs_are_laid_over_each_other(page: Page, tmp_path: Path) -> None:
    page.goto("/")
    for name in ("one", "two"):
        page.get_by_label(f"Choose {name}", exact=True).check()
    page.get_by_role("button", name="Overlay curves (2)").click()
    chart = page.locator(".chart", has_text="reward/mean")
    expect(chart.locator(".legend li")).to_have_count(2)
    page.get_by_label("Smooth").fill("0.6")
    with page.expect_response(lambda answer: "x=tokens" in answer.url):
        page.get_by_label("Over").select_option("tokens")
    picture(page, "overlay", tmp_path)
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    with page.expect_response(lambda answer: "low=" in answer.url and "high=" in answer.url):
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60)
        page.mouse.up()
    page.get_by_role("button", name="Whole range").click()
    page.get_by_label("Filter metrics").fill("grad")
    expect(page.locator(".chart")).to_have_count(1)


def test_two_runs_are_compared(page: Page, tmp_path: Path) -> None:
    page.goto("/")
    for name in ("two", "one"):
        page.get_by_label(f"Choose {name}", exact=True).check()
    page.get_by_role("button", name="Compare two").click()
    page.get_by_role("button", name="Swap").click()
    row = page.locator("tr", has_text="held-out tasks")
    expect(row).to_contain_text("40")
    expect(row.locator("td.sure")).to_have_text("-0.3")
    assert page.locator("tr", has_text="max_staleness").locator("td").all_inner_texts() == [
        "max_staleness",
        "not there",
        "1",
    ]
    picture(page, "compared", tmp_path)
    page.get_by_label("only where").check()
    texts = page.locator("section", has_text="batch means").locator("tbody td:first-child").all_inner_texts()
    assert "reward/mean" in texts
    assert "grad_norm" not in texts


def test_two_settings_are_compared_over_seeds(browser: Browser, tmp_path: Path) -> None:
    for seed in range(4):
        make_run(tmp_path / "runs" / f"sync-{seed}", 20, seed=seed)
        config(tmp_path / "runs" / f"sync-{seed}", seed=seed)
        make_run(tmp_path / "runs" / f"async-{seed}", 20, seed=10 + seed, gain=0.012 + 0.001 * seed)
        config(tmp_path / "runs" / f"async-{seed}", seed=seed, max_staleness=1)
    wide = WIDE | {"height": 1000}
    with served(tmp_path / "runs") as site, watched(browser, site.address, viewport=wide) as page:
        page.goto("/#/compare?a=sync-0&b=async-2")
        section = page.locator(".over-seeds")
        expect(section.locator("h2")).to_contain_text("in pairs of equal seeds")
        row = section.locator("tr", has_text="reward/mean")
        expect(row.locator("td.sure")).to_have_count(1)
        expect(row.locator("circle")).to_have_count(8)
        expect(row.locator("line")).to_have_count(4)
        expect(section.locator("tr", has_text="held-out tasks, step 20").locator("td").nth(1)).to_have_text("4")
        picture(page, "seeds", tmp_path)
        section.get_by_role("button", name="All").click()
        expect(section.locator("tr", has_text="seconds/reward")).to_have_count(1)
        section.locator(".seeds a").first.click()
        expect(page.locator("h1")).to_contain_text("sync-0")


def test_no_rows_of_training_are_shown_as_evaluations(page: Page) -> None:
    page.goto("/#/run?run=one&tab=rollouts")
    page.locator(".rollouts a").first.wait_for()
    held: list[Route] = []
    holding = True
    page.route(re.compile("of=evaluations"), lambda route: held.append(route) if holding else route.continue_())
    page.get_by_label(re.compile("^Of ")).select_option("evaluations")
    expect(page.locator(".rollouts a")).to_have_count(0)
    expect(page.get_by_text("Reading completions")).to_be_visible()
    holding = False
    for each in held:
        each.continue_()
    page.locator(".rollouts a").first.click()
    expect(page.locator("h1")).to_contain_text("evaluation after step")


def test_an_agents_rollout_token_by_token_and_turn_by_turn(page: Page, tmp_path: Path) -> None:
    page.goto("/#/run?run=one&tab=rollouts")
    page.get_by_label("Search").fill("do not know")
    expect(page.get_by_role("status")).to_have_text("12 completions in 3 steps")
    with page.expect_response(lambda answer: "sort=reward" in answer.url):
        page.get_by_label("Sort").select_option("reward")
    picture(page, "rollouts", tmp_path)
    page.get_by_role("link", name="I do not know.").first.click()
    tokens = page.locator(".token")
    tokens.first.wait_for()
    text = "".join(tokens.all_inner_texts()).replace("\u21b5\n", "\n")
    assert "How many apples are 1 and 3?" in text
    assert text.count("The tool says: 4") == 1
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".about")).to_contain_text("index, id")
    tokens.last.hover()
    expect(page.locator(".about")).to_contain_text("log-prob, engine")
    for name in ("log-prob, trainer", "gap", "advantage", "entropy", "version"):
        expect(page.locator(".about dt", has_text=re.compile(f"^{name}$"))).to_have_count(1)
    grounds = {}
    for colour in ("log-prob", "engine/trainer gap", "entropy", "advantage", "mask"):
        page.get_by_role("button", name=colour, exact=True).click()
        grounds[colour] = tokens.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
    learned = [ground != "rgba(0, 0, 0, 0)" for ground in grounds["mask"]]
    assert 0 < sum(learned) < len(learned)
    assert [ground != "rgba(0, 0, 0, 0)" for ground in grounds["advantage"]] == learned
    for colour in ("log-prob", "engine/trainer gap", "entropy"):
        assert len(set(grounds[colour])) > 5
    page.get_by_role("button", name="drafts", exact=True).click()
    found = tokens.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
    assert len(set(found)) == 4
    assert all(ground == "rgba(0, 0, 0, 0)" for ground, mine in zip(found, learned, strict=True) if not mine)
    tokens.nth(learned.index(True)).hover()
    expect(page.locator(".about")).to_contain_text("an earlier completion's token, accepted")
    expect(page.locator(".scale")).to_contain_text("sampled in place of a rejected draft")
    picture(page, "drafts", tmp_path)
    page.get_by_role("button", name="log-prob", exact=True).click()
    picture(page, "tokens", tmp_path)
    page.get_by_role("tab", name="Turns").click()
    expect(page.locator(".branches > .branch")).to_have_count(2)
    expect(page.locator(".turn.observation")).to_have_count(1)
    picture(page, "agent", tmp_path)
    page.goto("/#/run?run=one&tab=rollouts")
    with page.expect_response(lambda answer: "of=evaluations" in answer.url):
        page.get_by_label(re.compile("^Of ")).select_option("evaluations")
    page.locator(".rollouts a").first.click()
    expect(page.locator("h1")).to_contain_text("evaluation after step 30")
    page.go_back()
    page.go_back()
    page.locator(".end a:not([aria-current])").click()
    expect(page.locator(".end a[aria-current]")).to_have_text(re.compile(r"main-\d+/1$"))


def test_a_completion_is_rated_and_answered_better(browser: Browser, tmp_path: Path) -> None:
    run = feedback_runs.make_run(tmp_path / "apples")
    with served(tmp_path) as site, watched(browser, site.address, viewport=WIDE) as page:
        page.goto("/#/run?run=apples&tab=rollouts&step=2&text=it%20is%2016")
        page.locator(".rollouts a").first.click()
        page.get_by_text("Feedback", exact=True).click()
        page.get_by_role("button", name="2 of 5 stars").click()
        expect(page.locator(".said")).to_contain_text("ann rated it 0.25")
        page.get_by_role("button", name="Write a better answer").click()
        page.get_by_label("A better answer").fill("12 and 3 is 15 jk?")
        page.get_by_role("button", name="Save answer").click()
        expect(page.locator(".said li")).to_have_count(2)
        picture(page, "feedback", tmp_path)
        page.locator(".said li", has_text="rated").get_by_role("button", name="Undo").click()
        expect(page.locator(".said li")).to_have_count(1)
        expect(page.get_by_role("button", name="2 of 5 stars")).to_have_text("☆")
    found = feedback_runs.everything(open_feedback(run))
    assert found["rated"] == []
    assert [group.experiences[0].response for group in found["expert"]] == ["12 and 3 is 15 jk?"]


@pytest.mark.parametrize("name", ["task", "timeline", "pipeline"])
def test_the_other_tabs(page: Page, tmp_path: Path, name: str) -> None:
    page.goto(f"/{PAGES[name]}")
    settle(page)
    text = page.locator("main").inner_text()
    if name == "task":
        assert "apples/1" in text
        expect(page.locator(".chart canvas")).to_have_count(2)
    elif name == "timeline":
        lanes = page.locator(".lane-name b").all_inner_texts()
        assert lanes[:6] == ["trainer", "explorer 0", "explorer 1", "step", "optimizer", "generate"]
        expect(page.locator(".chart canvas")).to_have_count(3)
        processes = page.locator("section", has_text="Processes")
        assert processes.locator(".legend span").all_inner_texts()[:3] == ["rollout", "inference", "reward"]
        before = processes.locator(".lane-bars i").count()
        with page.expect_response(lambda answer: "processes" in answer.url and "seconds=60" in answer.url):
            page.get_by_label("Time").select_option("60")
        expect(processes.locator(".lane-bars i").nth(before // 2)).to_have_count(0)
        page.get_by_label("Time").select_option("600")
        expect(processes.locator(".lane-bars i")).to_have_count(before)
    else:
        assert page.locator(".funnel-name").all_inner_texts() == [
            "before the pipeline",
            "after uniform",
            "after length_bonus",
            "learned from",
        ]
        assert "too easy 150" in text
    picture(page, name, tmp_path)


def test_everything_by_keyboard(page: Page) -> None:
    page.goto("/")
    page.locator("tbody tr").first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("two")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Overview")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("3")
    page.locator("tbody tr").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator(".tokens").wait_for()
    first = page.locator("h1").inner_text()
    page.keyboard.press("j")
    expect(page.locator("h1")).not_to_have_text(first)
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text(first)
    page.keyboard.press("u")
    page.locator(".rollouts").wait_for()
    page.keyboard.press("u")
    page.locator(".runs").wait_for()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next, previous row")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_pictures_of_a_task_with_the_boxes_of_the_answer(browser: Browser, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (400, 200), (20, 120, 60))
    image.save(tmp_path / "field.png")
    reference = asdict(make_image_ref(tmp_path / "field.png"))
    run = feedback_runs.make_run(tmp_path / "runs" / "seeing")
    one = completion(3, "see-1", 0, "Where is it?", "[40, 20, 80, 60]", 1.0)
    one.info |= {
        "images": [reference, reference | {"sha256": "0" * 64}],
        "boxes": [[40, 20, 80, 60], [200, 100, 200, 100]],
    }
    RolloutLog(run / "rollouts").write(3, [one])
    with served(tmp_path / "runs") as site, watched(browser, site.address, viewport=WIDE) as page:
        page.goto("/#/run?run=seeing&tab=rollouts&step=3")
        page.locator(".rollouts a").first.click()
        shown = page.locator(".pictures img")
        expect(shown).to_have_count(1)
        assert shown.evaluate("one => [one.naturalWidth, one.naturalHeight]") == [192, 96]
        boxes = page.locator(".pictures .box").evaluate_all("all => all.map((one) => one.style.left)")
        assert boxes == ["19.2px", "96px"]
        expect(page.locator(".pictures .hint")).to_contain_text("is gone, or has changed")
        picture(page, "pictures", tmp_path)


def test_light_and_dark(page: Page, tmp_path: Path) -> None:
    """The system's choice, then the user's, which stays."""
    page.emulate_media(color_scheme="dark")
    page.goto("/#/run?run=one&tab=curves")
    settle(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    picture(page, "dark", tmp_path)
    page.keyboard.press("t")
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    settle(page)
    assert page.evaluate(ground) == light
    page.keyboard.press("t")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == dark


def test_nothing_is_cut_off_on_a_small_screen(small: Page, tmp_path: Path) -> None:
    for name, path in PAGES.items():
        small.goto(f"/{path}")
        settle(small)
        wide = small.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{name} is {wide} wide"
        small.screenshot(path=Path(os.environ.get("ROLLMILL_SCREENSHOTS", tmp_path)) / f"small-{name}.png")
    small.goto("/#/run?run=one&tab=rollouts")
    small.locator(".rollouts a").first.click()
    settle(small)
    small.locator(".token").last.click()
    expect(small.locator(".about")).to_contain_text("log-prob, engine")
    assert small.evaluate("document.documentElement.scrollWidth") <= 390
    small.screenshot(path=Path(os.environ.get("ROLLMILL_SCREENSHOTS", tmp_path)) / "small-tokens.png")


def test_every_control_has_a_name(page: Page) -> None:
    for path in PAGES.values():
        page.goto(f"/{path}")
        settle(page)
        assert nameless_controls(page) == []


def test_hostile_texts_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    """Markup, templates, escape codes and direction marks in completions, ids, names, metrics, events, the run file."""
    run = make_run(tmp_path / "runs" / "<img src=x onerror='window.pwned = 1'>", 10, **{HOSTILE[0]: HOSTILE[1]})
    made = []
    for number, text in enumerate(HOSTILE):
        one = completion(11, f"group {HOSTILE[2]}", number, "prompt", f"answer {number}", 0.5)
        one.id, one.response, one.task_id = f"{text}/{number}", text, f"{HOSTILE[0]} {text}"
        one.reward_parts, one.info, one.turns[-1].text = {text: 0.5}, {"episode": number, text: {text: text}}, text
        one.turns[0].role = HOSTILE[1]
        made.append(one)
    RolloutLog(run / "rollouts").write(11, made)
    log = MetricsLog(run / "metrics.jsonl")
    log.append(
        {"step": 11, "stage": HOSTILE[0], f"loss/{HOSTILE[1]}": 1.0, f"pipeline/{HOSTILE[0]}/{HOSTILE[1]}": 2.0}
        | {f"seconds/{HOSTILE[2]}": 1.0}
    )
    log.close()
    (run / "events.jsonl").write_text('{"time": 1, "event": "<img src=x onerror=window.pwned=1>", "text": "<b>"}\n')
    heading = f"/#/run?run={run.name.replace(' ', '%20')}"
    with served(tmp_path / "runs") as site, watched(browser, site.address, viewport=WIDE) as page:
        page.goto("/")
        page.get_by_role("link", name=run.name).wait_for()
        for tab in ("overview", "curves", "timeline", "pipeline", "checkpoints", "config"):
            page.goto(f"{heading}&tab={tab}")
            settle(page)
            closed = page.locator("section.group button[aria-expanded=false]")
            while closed.count():
                closed.first.click()
        page.goto(f"{heading}&tab=rollouts&step=11")
        settle(page)
        shown = page.locator(".rollouts td.text a").all_inner_texts()
        assert shown[:5] == HOSTILE[:5]
        assert shown[5:] == [
            "\\x1b[2J\\x07 and \\x00",
            "safe \\u202etxt.exe\\u2066 \\u200b\\ufeff",
            "&lt;b&gt; &amp; ?",  # as the table can hold it
        ]
        for number in range(len(HOSTILE)):
            page.goto(f"{heading}&tab=rollouts&step=11")
            page.locator(".rollouts td.text a").nth(number).click()
            page.get_by_role("tab", name="Turns").click()
            page.locator(".turn").last.wait_for()
            page.get_by_text("Further details").click()
            page.get_by_text("Feedback", exact=True).click()
            settle(page)
        assert page.evaluate("window.pwned") is None
        assert page.locator("main img, main script, main svg").count() == 0
