"""The table of completions against a plain reading of the files: filters, orders, replaced files, hostile texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.feedback_runs import completion
from support.ui_runs import agent_rollout

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.studio.ui.catalog import RunCatalog
from rollmill.apps.studio.ui.rollout_table import RolloutQuery, RolloutTable
from rollmill.apps.studio.ui.token_view import read_experience, token_page, turn_tree
from rollmill.trackers.rollout_log import RolloutLog

TEXTS = ["100% sure", "50_50", "a\\b", "Straße", "'; DROP TABLE rollouts; --", "", "plain", "<b>"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = RolloutLog(tmp_path / "run" / "rollouts")
    for step in (1, 2, 3):
        made = [
            completion(step, f"main-{step}", n, f"prompt {n}\n", text, (n % 4) / 3, f"task/{n % 3}")
            for n, text in enumerate(TEXTS)
        ]
        made[6].reward = None
        log.write(step, made)
    return tmp_path / "run"


def table(run: Path, versions: dict[int, int] | None = None) -> RolloutTable:
    catalog = RunCatalog(run.parent)
    return RolloutTable(run / "rollouts", run.parent / "table.sqlite", lambda: versions or {}, catalog.check_links)


def rows(found: RolloutTable, **query: Any) -> list[dict[str, Any]]:
    return found.find(RolloutQuery(**query))["rows"]  # type: ignore[no-any-return]


def test_every_text_is_found_as_it_is(run: Path) -> None:
    found = table(run)
    assert found.refresh(60) == 0
    for text in filter(None, TEXTS):
        assert [row["response"] for row in rows(found, text=text, step=2)] == [text]
    assert [row["response"] for row in rows(found, text="PLAIN", step=1)] == ["plain"]
    assert len(rows(found, text="%")) == 3
    assert len(rows(found, text="prompt")) == 24
    assert rows(found, text="nowhere") == []


@pytest.mark.parametrize("sort", ["reward", "length", "staleness", "turns"])
@pytest.mark.parametrize("descending", [True, False])
def test_orders_put_what_is_unknown_last(run: Path, sort: str, descending: bool) -> None:
    found = table(run, {1: 5})
    found.refresh(60)
    values = [row[sort] for row in rows(found, sort=sort, descending=descending)]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=descending)
    assert values[len(known) :] == [None] * (len(values) - len(known))
    assert (sort == "reward") == (None in values)


def test_filters_pages_and_totals(run: Path) -> None:
    found = table(run, {3: 7})
    found.refresh(60)
    assert {row["task"] for row in rows(found, task="task/1")} == {"task/1"}
    assert [row["step"] for row in rows(found, sort="oldest")] == [1] * 8 + [2] * 8 + [3] * 8
    assert rows(found, sort="newest")[0]["step"] == 3
    some = rows(found, at_least=0.3, at_most=0.7)
    assert {round(row["reward"], 2) for row in some} == {0.33, 0.67}
    first = found.find(RolloutQuery(limit=5))
    assert (first["total"], len(first["rows"]), first["steps"], first["pending"]) == (24, 5, 3, 0)
    assert [row["id"] for row in rows(found, limit=5, offset=5)] == [row["id"] for row in rows(found)][5:10]
    for step, version in ((3, 7), (1, 0)):  # of step 1 the metrics say nothing
        for row in rows(found, step=step):
            assert row["staleness"] == read_experience(found.line(step, row["offset"])).staleness(version)


def test_files_are_read_in_slices_the_newest_first(run: Path) -> None:
    found = table(run)
    left = [found.refresh(0) for _ in range(3)]
    assert left == [2, 1, 0]
    other = RolloutTable(run / "rollouts", run.parent / "other.sqlite", dict, RunCatalog(run.parent).check_links)
    assert other.refresh(0) == 2
    assert {row["step"] for row in rows(other)} == {3}
    assert other.find(RolloutQuery())["pending"] == 2


def test_a_resumed_run_replaces_files(run: Path) -> None:
    found = table(run)
    found.refresh(60)
    (run / "rollouts" / "step-000003.jsonl").unlink()
    RolloutLog(run / "rollouts").write(2, [completion(2, "new", 0, "p", "again", 1.0)])
    [old] = rows(found, step=3, text="plain")
    assert found.refresh(60) == 0
    assert [row["response"] for row in rows(found, step=2)] == ["again"]
    assert rows(found, step=3) == []
    with pytest.raises(RequestRefusedError, match="has no completion"):
        found.line(3, old["offset"], old["id"])


def test_damaged_lines_are_left_out(run: Path) -> None:
    with (run / "rollouts" / "step-000001.jsonl").open("a") as file:
        file.write('not JSON\n{"id": 3}\n[]\n{"torn')
    found = table(run)
    assert found.refresh(60) == 0
    assert len(rows(found, step=1)) == 8


def test_links_out_of_the_folder_are_refused(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.jsonl"
    outside.write_bytes((run / "rollouts" / "step-000001.jsonl").read_bytes())
    os.symlink(outside, run / "rollouts" / "step-000009.jsonl")
    found = table(run)
    with pytest.raises(RequestRefusedError, match="is a link that leaves"):
        found.refresh(60)
    with pytest.raises(RequestRefusedError, match="is a link that leaves"):
        found.line(9, 0)


def test_the_turns_of_an_agent_are_a_tree(tmp_path: Path) -> None:
    """Two paths share the first call; each experience names itself where its path ends."""
    made = agent_rollout(1, 7, np.random.default_rng(0))
    RolloutLog(tmp_path / "run" / "rollouts").write(1, made)
    found = table(tmp_path / "run")
    found.refresh(60)
    listed = rows(found, sort="oldest")
    assert len(listed) == len(made) == 2
    offsets = found.episode(1, listed[1]["offset"])
    assert offsets == [row["offset"] for row in listed]
    [tree] = turn_tree([read_experience(found.line(1, offset)) for offset in offsets], offsets)
    roles = []
    while len(tree["children"]) == 1:
        roles.append((tree["role"], len(tree["paths"])))
        [tree] = tree["children"]
    assert roles == [("prompt", 2), ("assistant", 2)]
    assert tree["role"] == "observation"
    assert "The tool says: 10" in tree["text"]
    ends = [(child["text"], [end["id"] for end in child["ends"]]) for child in tree["children"]]
    assert ends == [("The answer is 10.", [made[0].id]), ("I do not know.", [made[1].id])]


def test_a_page_of_tokens_has_the_numbers_of_the_file(run: Path) -> None:
    one = completion(4, "long", 0, "p" * 3000, "answer 12, " * 900, 0.5)
    one.logprobs[-1] = -np.inf
    one.entropy = np.full(len(one.token_ids), 0.25, np.float32)
    RolloutLog(run / "rollouts").write(4, [one])
    found = table(run)
    stored = read_experience(found.line(4, 0))
    pages, start = [], 0
    while start < len(one.token_ids):
        pages.append(token_page(stored, None, start))
        start += len(pages[-1]["ids"])
    assert [page["total"] for page in pages] == [len(one.token_ids)] * len(pages)
    assert len(pages) == 2
    assert [each for page in pages for each in page["ids"]] == one.token_ids.tolist()
    assert [each for page in pages for each in page["logprobs"]] == one.logprobs.tolist()
    assert pages[0]["texts"][0] == f"<{one.token_ids[0]}>"
    assert pages[1]["entropy"] == [0.25] * len(pages[1]["ids"])
    assert pages[0]["trainer_logprobs"] is None
