"""What is imitated: each demonstration once per epoch, new feedback first, undone feedback never."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.buffer import DemonstrationPool, ExperienceKind, ExperienceStore, Group
from rollmill.buffer.base import FEEDBACK
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.offline_data import RatingOverrides, StoreReader, TasksetDemonstrations
from rollmill.buffer.sql import SqlStore
from rollmill.data import Taskset, build_sampler
from rollmill.data.samplers.builtin.batch_sampler import CurriculumSampler
from rollmill.data.samplers.builtin.epochs import ShuffledSampler
from rollmill.errors import StoreError
from rollmill.types import Experience, ExperienceSource, Task


def experience(
    name: str, source: ExperienceSource = ExperienceSource.EXPERT, reward: float | None = None
) -> Experience:
    return Experience(
        id=name,
        task_id="t",
        group=name,
        token_ids=np.arange(4, dtype=np.int32),
        action_mask=np.array([False, True, True, True]),
        logprobs=np.array([0, -1, -2, -3], np.float32),
        versions=np.array([-1, 2, 2, 2], np.int32),
        reward=reward,
        source=source,
    )


def expert(name: str, **info: object) -> Group:
    return Group(name, [experience(name)], ExperienceKind.EXPERT, writer=FEEDBACK, info=dict(info))


def rated(name: str, of: str, reward: float, at: float = 0.0) -> Group:
    own = [experience(f"{name}/0", ExperienceSource.ROLLOUT, reward)]
    return Group(name, own, ExperienceKind.RATED, writer=FEEDBACK, author="ann", created_at=at, info={"of": [of]})


def pool(
    *stores: ExperienceStore,
    tasks: int = 0,
    pairs: bool = False,
    labels: bool = False,
    rated_at_least: float | None = 1.0,
    seed: int = 0,
) -> DemonstrationPool:
    own = None
    if tasks:
        rows = [Task(f"task-{n}", "p", response="r") for n in range(tasks)]
        own = TasksetDemonstrations(
            build_sampler(Taskset("s", rows, []), ShuffledSampler(), 0, batch=4),
            lambda task, place: [experience(task.id)],
            rows,
        )
    readers = [StoreReader(f"store {n}", lambda store=store: store) for n, store in enumerate(stores)]
    options: Any = {"pairs": pairs, "labels": labels, "rated_at_least": rated_at_least, "seed": seed}
    return DemonstrationPool(own, readers, **options, tokenizer="abc", context=8)


def ids(experiences: list[Experience]) -> list[str]:
    return [each.id for each in experiences]


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ExperienceStore:
    if request.param == "memory":
        return MemoryStore()
    return SqlStore(Database(sqlite_url(tmp_path / "buffer.sqlite")), "run")


def test_each_once_per_epoch_and_new_ones_first(store: ExperienceStore) -> None:
    store.put([expert(f"old-{n}") for n in range(4)])
    demonstrations = pool(store)
    first = ids(demonstrations.draw(4))
    assert sorted(first) == [f"old-{n}" for n in range(4)]
    second = ids(demonstrations.draw(2))
    store.put([expert("new")])
    assert "new" in ids(demonstrations.draw(3))
    assert len(set(second)) == 2
    again = Counter(ids(demonstrations.draw(50)))
    assert set(again) == {*first, "new"}
    assert max(again.values()) - min(again.values()) <= 1


def test_a_batch_is_full_however_few_there_are(store: ExperienceStore) -> None:
    store.put([expert("only")])
    demonstrations = pool(store)
    assert [ids(demonstrations.draw(count)) for count in (2, 3, 1)] == [["only"] * count for count in (2, 3, 1)]


def test_undone_feedback_is_not_handed_out_and_redone_feedback_is(store: ExperienceStore) -> None:
    store.put([expert("a"), expert("b")])
    demonstrations = pool(store)
    demonstrations.draw(2)
    store.remove(["a"], by="ann")
    assert set(ids(demonstrations.draw(6))) == {"b"}
    store.remove(["b"], by="ann")
    assert demonstrations.draw(3) == []
    store.restore(["a"])
    assert set(ids(demonstrations.draw(2))) == {"a"}


def test_what_was_undone_before_anybody_looked_counts_once_it_is_redone(store: ExperienceStore) -> None:
    store.put([rated("first", "g/0", 1.0, at=1.0), rated("second", "g/0", 0.0, at=2.0)])
    store.remove(["first"], by="ann")  # a rating takes the place of the one before
    demonstrations, ratings = pool(store), RatingOverrides([StoreReader("run", lambda: store)])
    completion = experience("g/0", ExperienceSource.ROLLOUT, 0.5)
    assert demonstrations.draw(1) == []
    assert ratings.apply_ratings([completion])[0].reward == 0.0
    store.remove(["second"], by="ann")
    store.restore(["first"])
    assert ids(demonstrations.draw(1)) == ["first/0"]
    assert ratings.apply_ratings([completion])[0].reward == 1.0


def test_stores_come_before_the_taskset_and_again_in_its_next_epoch(store: ExperienceStore) -> None:
    store.put([expert("mine")])
    demonstrations = pool(store, tasks=3)
    flat = [name for _ in range(4) for name in ids(demonstrations.draw(2))]
    assert flat[0] == "mine"
    assert sorted(flat[1:4]) == ["task-0", "task-1", "task-2"]
    assert Counter(flat[4:])["mine"] == 1


def test_only_completions_that_were_rated_highly_are_imitated(store: ExperienceStore) -> None:
    store.put([rated("good", "x/0", 1.0), rated("fair", "x/1", 0.5)])
    [one] = pool(store).draw(1)
    assert one.id == "good/0"
    assert one.source is ExperienceSource.EXPERT
    assert one.reward is None
    assert one.versions.tolist() == [-1] * 4
    assert one.logprobs.tolist() == [0.0] * 4
    assert one.action_mask.tolist() == [False, True, True, True]
    assert pool(store, rated_at_least=None).draw(1) == []
    assert len(set(ids(pool(store, rated_at_least=0.5).draw(2)))) == 2


def test_labels_are_ratings_and_both_of_a_pair_each_on_its_own(store: ExperienceStore) -> None:
    pair = [
        experience("p/chosen", ExperienceSource.PREFERENCE, 1.0),
        experience("p/rejected", ExperienceSource.PREFERENCE, 0.0),
    ]
    store.put([rated("good", "x/0", 1.0), rated("fair", "x/1", 0.5), expert("shown")])
    store.put([Group("p", pair, ExperienceKind.PREFERENCE, writer=FEEDBACK)])
    found = pool(store, labels=True).draw(3)
    worth = {"good/0": 1.0, "fair/0": 0.0, "p/chosen": 1.0, "p/rejected": 0.0}
    assert {each.id: each.reward for each in found} == worth
    assert len({each.group for each in found}) == 4
    for each in found:
        assert (each.source, each.temperature) == (ExperienceSource.PREFERENCE, 1.0)
        assert each.versions.tolist() == [-1] * 4
        assert each.logprobs.tolist() == [0.0] * 4
    lower = pool(store, labels=True, rated_at_least=0.5).draw(3)
    assert {each.id: each.reward for each in lower}["fair/0"] == 1.0
    without = pool(store, labels=True, rated_at_least=None).draw(1)
    assert {each.id for each in without} == {"p/chosen", "p/rejected"}


def test_pairs_are_handed_out_whole_under_names_of_their_own(store: ExperienceStore) -> None:
    pair = [
        experience("p/chosen", ExperienceSource.PREFERENCE, 1.0),
        experience("p/rejected", ExperienceSource.PREFERENCE, 0.0),
    ]
    for each in pair:
        each.group = "p"
    store.put([Group("p", pair, ExperienceKind.PREFERENCE, writer=FEEDBACK), expert("no pair")])
    drawn = pool(store, pairs=True).draw(2)
    assert [each.id for each in drawn] == ["p/chosen", "p/rejected"] * 2
    assert drawn[0].group == drawn[1].group != drawn[2].group == drawn[3].group


def test_tokens_of_another_tokenizer_are_refused(store: ExperienceStore) -> None:
    store.put([expert("theirs", tokenizer="xyz")])
    with pytest.raises(StoreError, match=r"theirs was made with another tokenizer \(xyz\) than the policy's \(abc\)"):
        pool(store).draw(1)


def test_what_the_model_cannot_hold_is_left_out(store: ExperienceStore, caplog: pytest.LogCaptureFixture) -> None:
    long = expert("long")
    long.experiences[0].token_ids = np.arange(9, dtype=np.int32)
    long.experiences[0].action_mask = np.arange(9) > 0
    long.experiences[0].logprobs, long.experiences[0].versions = np.zeros(9, np.float32), np.zeros(9, np.int32)
    store.put([long, expert("short")])
    assert set(ids(pool(store).draw(3))) == {"short"}
    assert "group long is left out: it has 9 tokens, and the model's context holds 8" in caplog.text


def test_a_store_that_does_not_exist_yet_is_found_when_it_does(store: ExperienceStore) -> None:
    there: list[ExperienceStore] = []
    reader = StoreReader("later", lambda: there[0] if there else None)
    demonstrations = DemonstrationPool(
        None, [reader], pairs=False, rated_at_least=1.0, tokenizer="abc", context=8, seed=0
    )
    assert demonstrations.draw(2) == []
    store.put([expert("late")])
    there.append(store)
    assert ids(demonstrations.draw(1)) == ["late"]


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=12), cut=st.integers(0, 12), tasks=st.integers(0, 4))
def test_a_resumed_pool_goes_on_as_if_nothing_had_happened(counts: list[int], cut: int, tasks: int) -> None:
    store = MemoryStore()
    store.put([expert(f"e{n}") for n in range(5)])
    whole, before, after = (pool(store, tasks=tasks) for _ in range(3))
    expected = [ids(whole.draw(count)) for count in counts]
    found = [ids(before.draw(count)) for count in counts[:cut]]
    after.load_state_dict(before.state_dict())
    found += [ids(after.draw(count)) for count in counts[cut:]]
    assert found == expected


def test_the_last_rating_that_was_not_undone_counts(store: ExperienceStore) -> None:
    completion = experience("g/0", ExperienceSource.ROLLOUT, 1.0)
    other = experience("g/1", ExperienceSource.ROLLOUT, 0.0)
    ratings = RatingOverrides([StoreReader("run", lambda: store)])
    assert ratings.apply_ratings([completion]) == [completion]
    store.put([rated("first", "g/0", 0.25, at=1.0), rated("second", "g/0", 0.75, at=2.0)])
    found = ratings.apply_ratings([completion, other])
    assert [each.reward for each in found] == [0.75, 0.0]
    assert found[0].info == {"rated_by": "ann", "earned": 1.0}
    store.remove(["second"], by="ann")
    assert ratings.apply_ratings([completion])[0].reward == 0.25
    store.remove(["first"], by="ann")
    assert ratings.apply_ratings([completion])[0].reward == 1.0


def test_an_order_that_goes_by_steps_is_told_them() -> None:
    """A curriculum by difficulty also orders demonstrations, and its warm-up ends."""
    rows = [Task(f"task-{n}", "p", response="r", metadata={"difficulty": n / 5}) for n in range(6)]
    order = CurriculumSampler(by="difficulty", warmup=2, bound=0.7)
    sampler = build_sampler(Taskset("s", rows, []), order, 0, batch=4, observed=False)
    tasks = TasksetDemonstrations(sampler, lambda task, place: [experience(task.id)], rows)
    demonstrations = DemonstrationPool(tasks, [], pairs=False, rated_at_least=None, tokenizer="abc", context=8, seed=0)
    drawn = [ids(demonstrations.draw(3, step=step)) for step in range(4)]
    assert sorted(drawn[0] + drawn[1]) == [f"task-{n}" for n in range(6)]
    assert {*drawn[2], *drawn[3]} == {"task-4", "task-5"}


@pytest.mark.parametrize("tasks", [0, 7])
def test_a_step_that_spans_the_end_of_an_epoch_repeats_none(store: ExperienceStore, tasks: int) -> None:
    for seed in range(5):
        demonstrations = pool(store, tasks=tasks, seed=seed)
        store.put([] if tasks else [expert(f"e{n}") for n in range(7)])
        counts: Counter[str] = Counter()
        for step in range(14):  # the pool begins again in the midst of a step
            drawn = ids(demonstrations.draw(4))
            assert len(set(drawn)) == 4
            counts.update(drawn)
            if step % 3 == 0:  # and goes on from its state
                state, demonstrations = demonstrations.state_dict(), pool(store, tasks=tasks, seed=seed)
                demonstrations.load_state_dict(json.loads(json.dumps(state)))
        assert len(counts) == 7
        assert max(counts.values()) - min(counts.values()) <= 1


def test_fewer_tasks_than_a_step_needs_are_repeated() -> None:
    demonstrations = pool(MemoryStore(), tasks=3)
    assert Counter(ids(demonstrations.draw(9))) == {f"task-{n}": 3 for n in range(3)}
