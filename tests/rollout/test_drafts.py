"""Completions of earlier epochs as drafts: the cache, and runs that reuse."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import TASKS, outcome, tiny_run

from rollmill.config.rollout import ReuseConfig
from rollmill.engines.base import Draft
from rollmill.launch import resume, run
from rollmill.rollout.draft_cache import DraftCache
from rollmill.trackers import load_experiences, read_metrics
from rollmill.trackers.run_views import PlainView
from rollmill.types import DraftUse, drafted_tokens

FEW: dict[str, Any] = {"options": TASKS["options"] | {"size": 8}}
ONLY_RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-4}, "steps": 6}


def draft(*tokens: int) -> Draft:
    ids = np.array(tokens, np.int32)
    return Draft(ids, ids[:, None], np.full((len(ids), 1), 0.5, np.float32))


def tokens(drafts: Any) -> list[list[int] | None]:
    return [None if each is None else each.token_ids.tolist() for each in drafts]


def test_drafts_are_handed_out_once_by_index() -> None:
    cache = DraftCache(ReuseConfig())
    _, slot = cache.take("a", 2)
    slot[0], slot[1] = draft(1, 2), draft(3)
    again, _ = cache.take("a", 3)
    assert tokens(again) == [[1, 2], [3], None]
    assert tokens(cache.take("a", 2)[0]) == [None, None]


def test_of_two_rollouts_under_way_the_later_one_stays_whichever_ends_first() -> None:
    cache = DraftCache(ReuseConfig())
    (_, first), (_, second) = cache.take("a", 1), cache.take("a", 1)
    second[0] = draft(2)
    first[0] = draft(1)
    assert tokens(cache.take("a", 1)[0]) == [[2]]


def test_the_tasks_rolled_out_longest_ago_are_forgotten() -> None:
    cache = DraftCache(ReuseConfig(tasks=2))
    for name in ("a", "b", "a", "c"):
        cache.take(name, 1)[1][0] = draft(1)
    assert tokens(cache.take("b", 1)[0]) == [None]
    assert tokens(cache.take("c", 1)[0]) == [[1]]


@given(st.dictionaries(st.text(max_size=3), st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 99)))))
@settings(max_examples=30)
def test_a_cache_goes_on_as_it_was_at_the_mark(held: dict[str, dict[int, list[int]]]) -> None:
    cache, other = DraftCache(ReuseConfig()), DraftCache(ReuseConfig())
    for name, drafts in held.items():
        cache.take(name, 9)[1].update({index: draft(*ids) for index, ids in drafts.items()})
    cache.mark()
    for name in held:
        cache.take(name, 9)
    other.load_state_dict(cache.state_dict())
    other.mark()
    cache.load_state_dict(other.state_dict())
    for name, drafts in held.items():
        found = cache.take(name, 9)[0]
        assert tokens(found) == [drafts.get(index) for index in range(9)]
        assert all(each is None or (each.top_probs == 0.5).all() for each in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reuse")
    path = tiny_run(
        folder, **ONLY_RL, taskset=FEW, rollout={"reuse": {"top": 40}}, max_staleness=1, checkpoint={"keep_last": 9}
    )
    run(path, out=folder / "out", view=PlainView(io.StringIO()))
    return folder / "out"


def test_a_second_epoch_takes_over_what_the_new_weights_agree_with(whole: Path) -> None:
    metrics = read_metrics(whole)
    reusing = [each for each in metrics if "rollout/reuse/accepted" in each]
    assert len(reusing) >= 3
    assert metrics[1] not in reusing
    assert all(0.5 < each["rollout/reuse/accepted"] <= 1 for each in reusing)
    assert all(0.5 < each["rollout/reuse/share"] <= 1 for each in reusing)
    texts: dict[str, list[list[str]]] = {}
    for step in range(1, 7):
        for each in load_experiences(whole, step):
            own = each.versions[each.action_mask]
            assert len(set(own.tolist())) == 1
            epochs = texts.setdefault(each.id.rpartition("/")[2] + each.task_id, [])
            drafted = drafted_tokens(each)
            assert (drafted is None) == (not epochs)
            if drafted is not None:
                assert set(drafted[each.action_mask][:1].tolist()) <= {DraftUse.EARLIER, DraftUse.REJECTED}
                assert not drafted[~each.action_mask].any()
            epochs.append([each.response])
    assert sum(len(epochs) > 1 and epochs[0] == epochs[1] for epochs in texts.values()) > 5


def test_a_resumed_run_has_the_same_drafts(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for step in (4, 6):
        shutil.rmtree(out / f"checkpoints/step-{step:06d}")
    resume(out, view=PlainView(io.StringIO()))
    assert outcome(out) == outcome(whole)


def test_the_greedy_baseline_of_remax_is_no_draft(tmp_path: Path) -> None:
    changes = ONLY_RL | {"algorithm": {"name": "remax"}, "steps": 4, "evaluation": None}
    path = tiny_run(tmp_path, **changes, taskset=FEW, rollout={"reuse": {}, "group_size": 2})
    run(path, out=tmp_path / "out", view=PlainView(io.StringIO()))
    metrics = read_metrics(tmp_path / "out")
    assert metrics[-1]["rollout/reuse/accepted"] > 0
