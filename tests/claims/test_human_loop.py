"""A person looks at a run in a browser, and the next runs learn from exactly what the person said."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.browser import chromium, press
from support.feedback_runs import served
from support.tiny import tiny_run

from rollmill.launch import run
from rollmill.trackers.rollout_log import load_experiences
from rollmill.trackers.run_views import PlainView
from rollmill.types import Experience, ExperienceSource

pytestmark = pytest.mark.service

ONE_STAGE: dict[str, Any] = {"stages": None, "trainer": {"lr": 1e-3}, "evaluation": None}


def finished(folder: Path, name: str, **changes: Any) -> Path:
    path = tiny_run(folder, **(ONE_STAGE | changes))
    run(path, out=folder / name, view=PlainView(io.StringIO()))
    return folder / name


def act(site: str, group: list[Experience]) -> None:
    """Rate three completions, edit two, compare two pairs; then undo an edit and a comparison."""
    with chromium() as browser:
        page = browser.new_context(base_url=site).new_page()
        page.goto(f"/group?step=2&group={group[0].group}")
        cards = page.locator("article")
        press(page, cards.nth(0).get_by_role("button", name="5 of 5 stars: 1.0"))
        press(page, cards.nth(1).get_by_role("button", name="1 of 5 stars"))
        for place, text in ((2, "6+5+0=11 #11"), (3, "9+9+9=99 #99")):
            cards.nth(place).get_by_text("Write a better answer").click()
            cards.nth(place).get_by_label("Expert answer").fill(text)
            press(page, cards.nth(place).get_by_role("button", name="Save answer"))
        press(page, page.get_by_role("status").get_by_role("button", name="Undo"))
        for better, worse in ((0, 3), (1, 2)):
            cards.nth(better).get_by_label("better", exact=True).check()
            cards.nth(worse).get_by_label("worse", exact=True).check()
            press(page, page.get_by_role("button", name="Save comparison"))
        press(page, page.get_by_role("status").get_by_role("button", name="Undo"))


def tokens(experiences: list[Experience], source: ExperienceSource) -> set[tuple[str, tuple[int, ...]]]:
    return {(e.response, tuple(e.token_ids.tolist())) for e in experiences if e.source is source}


@pytest.mark.parametrize("store", ["sql", pytest.param("memory", marks=pytest.mark.thorough)])
def test_the_next_runs_learn_from_exactly_what_was_said(tmp_path: Path, store: str) -> None:
    first = finished(tmp_path, "first", steps=2, algorithm={"name": "grpo"}, buffer={"store": store})
    told = load_experiences(first, step=2)
    group = [e for e in told if e.group == told[0].group]
    assert len({tuple(e.token_ids.tolist()) for e in group}) == 4
    with served(first) as site:
        act(site.address, group)

    start = {"path": str(first / "checkpoints/step-000002"), "new": None}
    mix = finished(
        tmp_path, "mix", model=start, steps=2, algorithm={"name": "mix"}, offline_data={"sources": [str(first)]}
    )
    for step in (1, 2):
        learned = load_experiences(mix, step=step)
        found = tokens(learned, ExperienceSource.EXPERT)
        assert {text for text, _ in found} == {group[0].response, "6+5+0=11 #11"}
        assert (group[0].response, tuple(group[0].token_ids.tolist())) in found
        prompt = group[2].token_ids[: group[2].turns[0].end].tolist()
        [edited] = [ids for text, ids in found if text == "6+5+0=11 #11"]
        assert list(edited[: len(prompt)]) == prompt

    dpo = {"model": start, "algorithm": {"name": "dpo", "batch": 2}, "taskset": None, "rollout": None, "rewards": None}
    pairs = finished(tmp_path, "pairs", steps=2, offline_data={"sources": [str(first)]}, **dpo)
    for step in (1, 2):
        learned = load_experiences(pairs, step=step)
        assert [(e.reward, e.token_ids.tolist()) for e in learned] == [
            (1.0, group[0].token_ids.tolist()),
            (0.0, group[3].token_ids.tolist()),
        ] * 2
    assert "taskset" not in yaml.safe_load((pairs / "config.yaml").read_text())


def test_a_running_run_takes_up_what_is_said_meanwhile(tmp_path: Path) -> None:
    """Feedback on a run is imitated by its own next steps: here after it was resumed."""
    mixed = {"algorithm": {"name": "mix"}, "offline_data": {"sources": ["taskset", "run"]}, "checkpoint": {"every": 1}}
    out = finished(tmp_path, "out", steps=2, **mixed)
    group = [e for e in load_experiences(out, step=2) if e.source is ExperienceSource.ROLLOUT][:4]
    with served(out) as site:
        act(site.address, group)
    config = yaml.safe_load((out / "config.yaml").read_text())
    (out / "config.yaml").write_text(yaml.safe_dump(config | {"steps": 4}))
    state = out / "checkpoints"
    for later in state.glob("step-000002"):
        later.rename(tmp_path / "later")
    from rollmill.launch import resume

    resume(out, view=PlainView(io.StringIO()))
    said = {text for text, _ in tokens(load_experiences(out, step=2), ExperienceSource.EXPERT)}
    assert {"6+5+0=11 #11", group[0].response} <= said
    assert "9+9+9=99 #99" not in said
