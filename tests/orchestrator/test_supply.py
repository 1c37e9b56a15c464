"""Between explorer and trainer: batches stay full whatever the pipeline drops, and replayed groups join them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import outcome, tiny_run

from rollmill.buffer import ExperienceKind, open_run_store
from rollmill.buffer.base import IMPORTED
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.sql import SqlStore
from rollmill.errors import DeadlineError, PipelineError, StoreError
from rollmill.launch import resume, run
from rollmill.orchestrator.pacing import Pacing
from rollmill.trackers import read_metrics
from rollmill.trackers.rollout_log import load_experiences
from rollmill.trackers.run_views import PlainView

RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}, "evaluation": None}

OPERATORS = """
import asyncio, os, signal
import rollmill

@rollmill.operator
def every_third(batch, *, keep: int = 1):
    for name, group in batch.groups().items():
        if int(name.rpartition("-")[2]) % 3 != keep:
            for experience in group:
                batch.drop(experience, "not a third")

@rollmill.operator
async def nothing(batch):
    for experience in batch.experiences:
        batch.drop(experience, "all of it")

@rollmill.operator
class Halves:
    \"\"\"Drops every other group it sees; which one is next has to survive a restart.\"\"\"
    def __init__(self, *, first: int = 0):
        self.seen = first
    def __call__(self, batch):
        for group in batch.groups().values():
            self.seen += 1
            if self.seen % 2:
                for experience in group:
                    batch.drop(experience, "every other")
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]

@rollmill.operator
async def plus_one(batch, *, interrupt_at: str = "", once: str = ""):
    for experience in batch.experiences:
        experience.reward += 1
        experience.reward_parts["exact"] += 1
        experience.info["seen"] = experience.info.get("seen", 0) + 1
        experience.versions[experience.action_mask] += 0
        batch.change(experience, "plus one")
    if interrupt_at in batch.groups() and not os.path.exists(once):
        open(once, "w").close()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

@rollmill.operator
async def hanging(batch):
    import asyncio
    await asyncio.sleep(1000)

@rollmill.operator
def broken(batch):
    raise KeyError("no such thing")
"""

FORKING = """
import rollmill

@rollmill.workflow
async def forking(task, policy):
    for number in range(1 if policy._index else 3):
        await policy.complete(f"{task.prompt}{number}", max_new_tokens=3)
    return float(policy._index == 0)
"""


def started(folder: Path, **changes: Any) -> Path:
    (folder / "operators.py").write_text(OPERATORS)
    path = tiny_run(folder, plugins=[str(folder / "operators.py")], **(RL | changes))
    run(path, out=folder / "out", view=PlainView(io.StringIO()))
    return folder / "out"


def groups_of(out: Path) -> dict[int, list[str]]:
    found = {}
    for path in sorted((out / "rollouts").iterdir()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[rows[0]["step"]] = list(dict.fromkeys(row["group"] for row in rows))
    return found


def test_dropped_groups_are_made_up_for_and_the_order_stays(tmp_path: Path) -> None:
    out = started(tmp_path, steps=3, pipeline=[{"name": "every_third"}])
    numbers = {step: [int(name.rpartition("-")[2]) for name in names] for step, names in groups_of(out).items()}
    assert numbers == {1: [1, 4, 7, 10], 2: [13, 16, 19, 22], 3: [25, 28, 31, 34]}
    for row in read_metrics(out):
        assert row["completions"] == 16
        assert row["raw/groups"] in (11, 12)
        assert row["pipeline/every_third/kept"] == 16
        assert row["pipeline/every_third/not_a_third"] == row["pipeline/every_third/dropped"]
        assert row["pipeline/every_third/dropped"] == 4 * (row["raw/groups"] - 4)


def test_rewards_are_counted_by_rollout_however_many_experiences_it_gave(tmp_path: Path) -> None:
    """One rollout of four succeeds, and forks in three."""
    (tmp_path / "flow.py").write_text(FORKING)
    changes: dict[str, Any] = {"rewards": None, "steps": 1, "workflow": "forking", "plugins": ["flow.py"]}
    path = tiny_run(tmp_path, **RL, **changes, pipeline=[{"name": "length_filter", "at_least": 1}])
    run(path, ["rollout.group_size=4"], tmp_path / "out", view=PlainView(io.StringIO()))
    [row] = read_metrics(tmp_path / "out")
    assert row["raw/reward"] == row["reward/mean"] == 0.25
    assert row["experiences"] == 6 * row["raw/groups"]


def test_staleness_stays_within_its_bound_while_groups_are_dropped(tmp_path: Path) -> None:
    out = started(tmp_path, steps=4, max_staleness=2, pipeline=[{"name": "Halves"}])
    assert [len(names) for names in groups_of(out).values()] == [4] * 4
    assert max(row["staleness/max"] for row in read_metrics(out)) <= 2


def test_groups_that_make_up_for_dropped_ones_do_not_overtake_those_that_were_put_away(tmp_path: Path) -> None:
    """Else those with short completions would be favoured."""
    rollout = {"token_budget": 40, "batch": 3, "group_size": 2, "max_new_tokens": 40, "stop": ["1", "2"]}
    out = started(tmp_path, steps=6, max_staleness=2, rollout=rollout, pipeline=[{"name": "Halves"}])
    numbers = [int(name.rpartition("-")[2]) for names in groups_of(out).values() for name in names]
    assert sum(row["rollout/continued"] for row in read_metrics(out)) > 0
    assert numbers == sorted(set(numbers))
    assert max(row["staleness/max"] for row in read_metrics(out)) <= 2


@pytest.mark.slow
def test_what_the_pipeline_did_in_a_step_that_was_interrupted_is_not_done_twice(tmp_path: Path) -> None:
    """With max_staleness 1 the checkpoint holds groups that the interrupted step has sent through the pipeline."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "once").touch()
    operator = {"name": "plus_one", "interrupt_at": "train-000006", "once": str(tmp_path / "once")}
    whole = started(tmp_path / "whole", steps=3, max_staleness=1, pipeline=[operator])
    (tmp_path / "once").unlink()
    with pytest.raises(KeyboardInterrupt):
        started(tmp_path, steps=3, max_staleness=1, pipeline=[operator])
    resume(tmp_path / "out", view=PlainView(io.StringIO()))
    assert all(each.info["seen"] == 1 for step in (1, 2, 3) for each in load_experiences(tmp_path / "out", step))
    assert outcome(tmp_path / "out")["rollouts"] == outcome(whole)["rollouts"]


def test_a_pipeline_that_drops_everything_ends_the_run_and_names_the_operator(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"nothing was left of 12 groups .*`nothing` dropped 48 .*\(48 all of it\)"):
        started(tmp_path, steps=2, rollout={"refills": 2}, pipeline=[{"name": "nothing"}])


def test_an_operator_that_raises_is_named_with_the_task(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"operator `broken` failed on experiences of task .*no such thing"):
        started(tmp_path, steps=1, pipeline=[{"name": "broken"}])


@pytest.mark.slow
def test_an_operator_that_hangs_is_waited_for_no_longer_than_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="the pipeline waited 5 s for operator `hanging` on task rows:"):
        started(tmp_path, steps=1, rollout={"deadline_s": 5}, pipeline=[{"name": "hanging"}])


@pytest.mark.parametrize("store", ["auto", "memory"])
def test_replayed_groups_join_later_steps_within_their_rules(tmp_path: Path, store: str) -> None:
    replay = {"groups": 2, "order": "priority", "priority": "advantage", "max_uses": 2, "cooldown": 2, "max_age": 3}
    out = started(tmp_path, steps=6, buffer={"store": store, "replay": replay})
    uses: dict[str, list[int]] = {}
    for step, names in groups_of(out).items():
        for name in names:
            uses.setdefault(name, []).append(step)
    again = {name: steps for name, steps in uses.items() if len(steps) > 1}
    assert again, "nothing was replayed"
    assert all(len(steps) == 2 and 2 <= steps[1] - steps[0] <= 3 for steps in again.values())
    rows = read_metrics(out)
    assert [row["replay/groups"] for row in rows[:3]] == [0, 0, 2]
    assert all(row["completions"] == 16 for row in rows), "fresh completions alone are measured"
    first, second = (load_experiences(out, step=steps) for steps in next(iter(again.values())))
    name = next(iter(again))
    same = [[e for e in batch if e.group == name] for batch in (first, second)]
    assert [e.token_ids.tolist() for e in same[0]] == [e.token_ids.tolist() for e in same[1]]
    assert [e.logprobs.tolist() for e in same[0]] == [e.logprobs.tolist() for e in same[1]]


@pytest.mark.slow
def test_imported_groups_are_learned_from_in_place_of_rollouts_and_nothing_gets_stale(tmp_path: Path) -> None:
    first = started(tmp_path, steps=3, buffer={"store": "sql"})
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text((tmp_path / "run.yaml").read_text())
    (other / "machine.json").write_text(json.dumps({"threads": 1, "precision": "fp32", "run_id": "other"}))
    store = SqlStore(Database(sqlite_url(other / "buffer.sqlite")), "other")
    for number, group in list(open_run_store(first).read(ExperienceKind.ROLLOUT))[:6]:
        named = [replace(each, group=f"theirs-{number}") for each in group.experiences]
        store.put([replace(group, id=f"theirs-{number}", experiences=named, writer=IMPORTED)])
    store.close()
    resume(other, view=PlainView(io.StringIO()))
    found = groups_of(other)
    assert [name for names in found.values() for name in names] == [
        *(f"theirs-{number}" for number in range(1, 7)),
        *(f"train-{number:06d}" for number in range(6)),
    ]
    own = [e for step in (2, 3) for e in load_experiences(other, step=step) if e.group.startswith("train-")]
    assert {(e.oldest_version) for e in own if e.group <= "train-000001"} == {1}
    assert {(e.oldest_version) for e in own if e.group > "train-000001"} == {2}


def test_demonstrations_need_something_to_imitate(tmp_path: Path) -> None:
    sft: dict[str, Any] = {"algorithm": {"name": "sft", "batch": 4}, "steps": 1}
    told = sft | {"name": "told", "offline_data": {"sources": ["run"]}}
    with pytest.raises(StoreError, match=r"stage told: nothing to learn from in offline_data.sources \(run\)"):
        started(tmp_path, stages=[sft | {"name": "warm"}, told], algorithm=None, rewards=None, rollout=None)


@given(
    batch=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    steps=st.integers(1, 8),
    drops=st.lists(st.booleans(), min_size=1, max_size=60),
)
def test_pacing_makes_up_for_what_is_dropped(batch: int, max_staleness: int, steps: int, drops: list[bool]) -> None:
    """Every step gets its batch; nothing is admitted that is older than the bound when its turn comes."""
    pacing = Pacing(batch, max_staleness, steps)
    queue: list[int] = []  # versions groups were started at
    turn, submitted, dropped = 0, 0, 0
    for version in range(steps):
        kept: list[int] = []
        while len(kept) < batch:
            while pacing.may_start(version, len(kept) + len(queue)):
                queue.append(version)
                submitted += 1
            began = queue.pop(0)
            turn += 1
            if drops[turn % len(drops)] and turn % 7:
                dropped += 1
            else:
                kept.append(began)
        assert all(version - began <= max_staleness for began in kept)
    assert steps * batch == submitted - dropped
