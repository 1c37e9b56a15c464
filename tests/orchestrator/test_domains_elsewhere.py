"""Rows that name their workflow, and shares of the replayed groups, with explorers in other processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.domain_runs import FLOWS, WORDS, domains_of, rollouts, rows, run_file
from support.forks import Forks, forks

from rollmill.orchestrator.metrics import REPLAYED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ["twice", None, "single_turn"]
PLACES: dict[str, dict[str, Any]] = {
    "processes": {"mode": "train", "trainer_away_s": 60},
    "postgresql": {"mode": "train", "trainer_away_s": 60},
    "ray": {"placement": {"name": "ray", "explorers": 1, "cpus": 0.5}},
}


@pytest.fixture(scope="module")
def explorers(server: Forks) -> Iterator[Forks]:
    """Starts explorers beside the trainer's `server`."""
    with ExitStack() as stack:
        yield stack.enter_context(forks())


def written(folder: Path, store: dict[str, Any], **changes: Any) -> Path:
    """Write a run whose rows name their workflows, and whose domain `words` has three quarters of the replayed."""
    folder.mkdir()
    lines = [each | {"by": NAMES[n % len(NAMES)]} for n, each in enumerate(WORDS)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(each) for each in lines))
    (folder / "flow.py").write_text(FLOWS)
    words = {"taskset": {"path": "rows.jsonl", "fields": {"workflow": "by"}}, "pipeline": None, "replay_share": 0.75}
    buffer = {"replay": {"groups": 2}} | store
    run_file(
        folder, domains_of(folder, **words), plugins=["flow.py"], evaluation=None, steps=4, buffer=buffer, **changes
    )
    return folder


def summary(run: Path) -> list[tuple[Any, ...]]:
    """What was learned from: completions, their rewards, and whether they were replayed."""
    return [(row["id"], row["response"], row["reward"], row["info"].get(REPLAYED)) for row in rollouts(run)]


@pytest.mark.parametrize(
    "place",
    [
        "processes",
        pytest.param("postgresql", marks=pytest.mark.service),
        pytest.param("ray", marks=pytest.mark.thorough),
    ],
)
def test_rows_name_workflows_and_domains_have_shares_of_what_is_replayed(
    server: Forks, explorers: Forks, tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    """The run learns from the same completions as one in a single process, one call or two as the row says."""
    one = written(tmp_path / "one", {"store": "memory"})
    done = server.run("run", "run.yaml", "--out", "out", folder=one)
    assert done.code == 0, done.err

    store = {"url": request.getfixturevalue("pg").url} if place == "postgresql" else {}
    folder = written(tmp_path / "split", store, **PLACES[place])
    server.start("run", "run.yaml", "--out", "out", folder=folder)
    if place != "ray":
        explorers.start("run", "run.yaml", "--set", "mode=explore", "--out", "out", folder=folder)
    for each in (server, explorers)[: 1 + (place != "ray")]:
        done = each.wait()
        assert done.code == 0, done.err + done.out

    assert summary(folder / "out") == summary(one / "out")
    for step in range(1, 5):
        calls = Counter(
            (row["task_id"], row["group"]) for row in rows(folder / "out", f"rollouts/step-{step:06d}.jsonl")
        )
        for (task, _), count in calls.items():
            twice = task.startswith("words") and int(task.rpartition(":")[2]) % 3 == 0
            assert count == (6 if twice else 3 if task.startswith("words") else 4)
    steps = [row for row in rows(folder / "out", "metrics.jsonl") if "replay/groups" in row]
    found = [(row["domain/words/replayed"], row["domain/add/replayed"]) for row in steps]
    assert found[0] == (0, 0)
    assert set(found[1:]) <= {(1, 1), (2, 0)}, "shares of 2 groups: 1.5, and the rest"
