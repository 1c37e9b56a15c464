"""Every store: what is handed out, once, in order, and again after a lost answer or a rewind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from support.buffer_groups import awkward, group, ids, same_groups

from rollmill.buffer.base import FEEDBACK, IMPORTED, PIPELINE, ExperienceKind, ExperienceStore, Group
from rollmill.config.buffer import ReplayConfig
from rollmill.errors import DeadlineError, StoreError
from rollmill.types import Task


def test_groups_come_back_bit_for_bit(store: ExperienceStore) -> None:
    odd = Group("odd", [awkward()], ExperienceKind.EXPERT, 0.25, FEEDBACK, "Zoë \0", 12.25, {"why": ["a", 1.5]})
    plain = group("g1", kind=ExperienceKind.EXPERT)
    assert store.put([odd, plain]) == 2
    assert same_groups([each for _, each in store.read(ExperienceKind.EXPERT)], [odd, plain])


def test_an_empty_completion_and_an_empty_group_come_back(store: ExperienceStore) -> None:
    empty = awkward()
    empty.token_ids, empty.versions = np.zeros(0, np.int32), np.zeros(0, np.int32)
    empty.logprobs, empty.action_mask, empty.advantage = np.zeros(0, np.float32), np.zeros(0, bool), None
    groups = [Group("none", [], created_at=1.0), Group("empty", [empty], created_at=1.0)]
    store.put(groups)
    assert same_groups(store.take(2, step=1, deadline_s=0), groups)


def test_the_oldest_are_handed_out_once(store: ExperienceStore) -> None:
    store.put([group(f"g{i}") for i in range(5)])
    assert ids(store.take(2, step=1, deadline_s=0)) == ["g0", "g1"]
    assert ids(store.take(2, step=2, deadline_s=0)) == ["g2", "g3"]
    assert store.waiting() == 1


def test_the_same_step_gets_the_same_groups_again(store: ExperienceStore) -> None:
    store.put([group(f"g{i}") for i in range(4)])
    first = store.take(2, step=1, deadline_s=0)
    first[0].experiences[0].reward = -5.0  # of the one who got it
    again = store.take(2, step=1, deadline_s=0, min_version=100)
    assert ids(again) == ["g0", "g1"]
    assert again[0].experiences[0].reward == 1.0
    assert store.waiting() == 2


def test_a_known_id_is_left_as_it_is(store: ExperienceStore) -> None:
    assert store.put([group("g0"), group("g1"), group("g0", rewards=(0.5,))]) == 2
    assert store.put([group("g1", rewards=(0.5,)), group("g2")]) == 1
    store.take(3, step=1, deadline_s=0)
    assert store.put([group("g0")]) == 0
    assert store.waiting() == 0


def test_a_group_of_a_second_kind_is_refused(store: ExperienceStore) -> None:
    store.put([group("g0", kind=ExperienceKind.PARTIAL)])
    with pytest.raises(
        StoreError, match="group g0 is already stored as kind partial; give the group of kind usual another id"
    ):
        store.put([group("new"), group("g0")])
    with pytest.raises(StoreError, match="group g1 is already stored as kind usual"):
        store.put([group("g1"), group("g1", kind=ExperienceKind.EXPERT)])
    assert store.waiting() == 0


def test_numbers_of_numpy_are_numbers(store: ExperienceStore) -> None:
    made = group("g0")
    made.priority = np.float32(0.5)  # type: ignore[assignment]
    made.experiences[0].reward, made.experiences[0].info = np.float32(0.1), {"a": np.int64(3), "b": np.ones(2)}  # type: ignore[assignment]
    store.put([made])
    [found] = store.take(1, step=1, deadline_s=0)
    assert (found.priority, found.experiences[0].reward) == (0.5, float(np.float32(0.1)))
    found.priority = np.float32(0.25)  # type: ignore[assignment]
    store.update_priorities([found], step=1)
    store.mark()


def test_too_old_groups_are_counted_and_never_handed_out(store: ExperienceStore) -> None:
    store.put([group("old", version=1), group("new", version=3), group("old too", version=0)])
    assert (store.waiting(), store.waiting(min_version=2), store.waiting(min_version=4)) == (3, 1, 0)
    assert ids(store.take(1, step=4, deadline_s=0, min_version=2)) == ["new"]
    assert (store.expired(), store.waiting()) == (2, 0)
    with pytest.raises(DeadlineError):
        store.take(1, step=5, deadline_s=0)


def test_groups_without_policy_tokens_are_never_too_old(store: ExperienceStore) -> None:
    made = group("made")
    for each in made.experiences:
        each.versions[:] = -1
    store.put([made])
    assert ids(store.take(1, step=9, deadline_s=0, min_version=5)) == ["made"]


def test_a_reader_waits_for_the_writer(opened: Callable[[], ExperienceStore]) -> None:
    reader, writer = opened(), opened()
    later = threading.Timer(0.2, lambda: writer.put([group("late")]))
    later.start()
    assert ids(reader.take(1, step=1, deadline_s=20)) == ["late"]
    later.join()


def test_a_deadline_names_the_writer(store: ExperienceStore) -> None:
    with pytest.raises(DeadlineError, match=r"the trainer waited 0 s for a writer of groups \(none has ever"):
        store.take(1, step=1, deadline_s=0)
    store.put([group("g0")])
    with pytest.raises(
        DeadlineError, match=r"the explorer \(process \d+ on .*; it last wrote \d+ s ago, 1 groups.*1 of 2"
    ):
        store.take(2, step=1, deadline_s=0)
    assert store.waiting() == 1, "nothing is taken"


def test_readers_at_the_same_time_never_get_the_same_group(opened: Callable[[], ExperienceStore]) -> None:
    opened().put([group(f"g{i:03d}") for i in range(60)])
    stores, got, lock = [opened() for _ in range(3)], [], threading.Lock()

    def read(which: int) -> None:
        for turn in range(5):
            found = ids(stores[which].take(4, step=1 + which + 3 * turn, deadline_s=30))
            with lock:
                got.extend(found)

    threads = [threading.Thread(target=read, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [f"g{i:03d}" for i in range(60)]


def test_a_rewind_loses_nothing_and_repeats_nothing(store: ExperienceStore) -> None:
    store.put([group(f"g{i}") for i in range(4)])
    store.put([group("edit", writer=FEEDBACK, kind=ExperienceKind.EXPERT)])
    store.take(2, step=1, deadline_s=0)
    mark = store.mark()
    store.put([group("g4"), group("synth", writer=PIPELINE), group("more", writer=IMPORTED)])
    store.put([group("later", writer=FEEDBACK, kind=ExperienceKind.EXPERT)])
    assert ids(store.take(4, step=2, deadline_s=0)) == ["g2", "g3", "g4", "synth"]
    store.rewind(mark, step=1)
    assert store.put([group("g4", version=1), group("g2")]) == 1, "what was put after the mark is made again"
    assert ids(store.take(4, step=2, deadline_s=0)) == ["g2", "g3", "more", "g4"]
    assert [each.id for _, each in store.read(ExperienceKind.EXPERT)] == ["edit", "later"]


def test_a_rewind_to_the_start_keeps_feedback_and_imports(store: ExperienceStore) -> None:
    store.put([group("g0"), group("kept", writer=IMPORTED), group("edit", writer=FEEDBACK, kind=ExperienceKind.RATED)])
    store.take(2, step=1, deadline_s=0, min_version=None)
    store.rewind(None, step=0)
    assert store.waiting() == 1
    assert ids(store.take(1, step=1, deadline_s=0)) == ["kept"]
    assert [each.id for _, each in store.read(ExperienceKind.RATED)] == ["edit"]


def test_replay_looks_back_as_far_as_it_is_told(store: ExperienceStore) -> None:
    store.put([group(f"g{number}") for number in range(4)])
    for step in range(1, 5):
        store.take(1, step=step, deadline_s=0)
    rule = ReplayConfig(groups=4, order="fifo")
    assert ids(store.replay(rule, step=5, version=4, seed=0, since=2)) == ["g2", "g3"]
    assert ids(store.replay(rule, step=6, version=5, seed=0)) == ["g0", "g1", "g2", "g3"]


def test_a_rewind_undoes_what_was_too_old_for_later_steps(store: ExperienceStore) -> None:
    store.put([group("a", version=0), group("b", version=5), group("c", version=0)])
    mark = store.mark()
    store.take(1, step=6, deadline_s=0, min_version=3)
    store.rewind(mark, step=5)
    assert (store.expired(), store.waiting()) == (0, 3)


def test_a_mark_of_another_store_is_refused(store: ExperienceStore) -> None:
    other = "memory" if store.mark()["store"] == "sql" else "sql"
    with pytest.raises(StoreError, match=f"set buffer.store: {other}"):
        store.rewind({"store": other, "last": 0, "groups": [], "forgotten": 0}, step=0)


def test_removed_groups_are_gone_until_they_are_restored(store: ExperienceStore) -> None:
    store.put([group("a"), group("b"), group("e", kind=ExperienceKind.EXPERT)])
    store.remove(["a", "e"], by="Ann")
    store.remove(["a"], by="Bob")
    assert store.waiting() == 1
    assert ids(store.get(["a", "b", "e"])) == ["b"]
    assert list(store.read(ExperienceKind.EXPERT)) == []
    assert ids(store.get(["a", "b", "e"])) == ["b"]
    assert store.put([group("a")]) == 0
    store.restore(["a", "e"])
    assert ids(store.take(2, step=1, deadline_s=0)) == ["a", "b"]
    assert [each.id for _, each in store.read(ExperienceKind.EXPERT)] == ["e"]
    with pytest.raises(StoreError, match="no group nobody"):
        store.remove(["b", "nobody"], by="Ann")


def test_reading_goes_on_after_a_number(store: ExperienceStore) -> None:
    store.put([group(f"e{i}", kind=ExperienceKind.PREFERENCE, writer=FEEDBACK) for i in range(3)])
    numbers = [number for number, _ in store.read(ExperienceKind.PREFERENCE)]
    store.put([group("u"), group("e3", kind=ExperienceKind.PREFERENCE, writer=FEEDBACK)])
    assert [each.id for _, each in store.read(ExperienceKind.PREFERENCE, after=numbers[1])] == ["e2", "e3"]


def test_unfinished_groups_are_handed_out_once(store: ExperienceStore) -> None:
    store.put([group("u")])
    store.put([group(f"p{i}", kind=ExperienceKind.PARTIAL, version=i) for i in range(3)])
    assert ids(store.take_partial(2, step=1)) == ["p0", "p1"]
    assert ids(store.take_partial(2, step=1)) == ["p0", "p1"]
    assert store.waiting() == 1
    mark = store.mark()
    assert same_groups(store.take_partial(2, step=2), [group("p2", kind=ExperienceKind.PARTIAL, version=2)])
    assert store.take_partial(2, step=3) == []
    store.rewind(mark, step=1)
    assert ids(store.take_partial(2, step=2)) == ["p2"]


def test_tasks_come_back_exactly(store: ExperienceStore) -> None:
    picture = {"path": "/a.png", "sha256": "0" * 64, "size": 3, "media_type": "image/png", "width": 1, "height": 1}
    tasks = [
        Task("b", "1+1=", answer=2, taskset="sums"),
        Task(
            "a\0\ud800", [{"role": "user", "content": "\x1b"}], {"x": [0.1, None]}, "2", {"images": [picture]}, "t", "3"
        ),
    ]
    store.put_tasks(tasks)
    store.put_tasks([Task("c", "?"), Task("b", "1+1 = ?", answer=float("inf"))])
    assert list(store.tasks()) == [Task("b", "1+1 = ?", answer=float("inf")), tasks[1], Task("c", "?")]


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), -1.0])
def test_a_priority_that_is_none_is_refused(store: ExperienceStore, priority: float) -> None:
    with pytest.raises(StoreError, match="group bad has priority"):
        store.put([group("good"), group("bad", priority=priority)])
    assert store.waiting() == 0


def test_replay_gives_the_same_again_and_not_the_fresh_ones(store: ExperienceStore) -> None:
    store.put([group(f"g{i}") for i in range(12)])
    rule = ReplayConfig(groups=2)
    for step in (1, 2):
        store.take(3, step=step, deadline_s=0)
    found = store.replay(rule, step=2, version=1, seed=5)
    assert set(ids(found)) < {"g0", "g1", "g2"}
    assert ids(store.replay(rule, step=2, version=1, seed=99)) == ids(found)
    assert ids(store.take(3, step=2, deadline_s=0)) == ["g3", "g4", "g5"]


def test_replay_keeps_to_the_shares_of_domains(store: ExperienceStore) -> None:
    stored = [group(f"{name}/{i}") for i in range(4) for name in ("math", "code")]
    for each in stored:
        for one in each.experiences:
            one.task_id = each.id
    store.put(stored)
    store.take(8, step=1, deadline_s=0)
    rule = ReplayConfig(groups=4)
    found = ids(store.replay(rule, step=2, version=1, seed=5, shares={"math": 0.75}))
    assert [sum(id.startswith(name) for id in found) for name in ("math", "code")] == [3, 1]


def test_noted_priorities_come_back_with_the_group_and_are_undone(store: ExperienceStore) -> None:
    store.put([group("a"), group("b", priority=0.5)])
    rule = ReplayConfig(groups=2, order="fifo", priority="given")
    for step, priority in ((1, 3.0), (2, 7.0)):
        found = store.take(2, step=1, deadline_s=0) if step == 1 else store.replay(rule, step=2, version=1, seed=0)
        found[0].priority = priority
        store.update_priorities(found, step=step)
        if step == 1:
            mark = store.mark()
    assert [each.priority for each in store.replay(rule, step=3, version=2, seed=0)] == [7.0, 0.5]
    store.rewind(mark, step=1)
    assert [each.priority for each in store.replay(rule, step=2, version=1, seed=0)] == [3.0, 0.5]
