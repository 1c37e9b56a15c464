"""Token budgets and over-sampling in whole runs: tokens, log-probs and versions of what is stitched, and resuming."""

from __future__ import annotations

import io
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import merged, outcome, require_log_probs, tiny_run

from rollmill.buffer.base import version_segments
from rollmill.launch import resume, run
from rollmill.trackers import read_metrics
from rollmill.trackers.rollout_log import load_experiences
from rollmill.trackers.run_views import PlainView
from rollmill.types import Experience, StopReason

RL: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "trainer": {"lr": 1e-3},
    "evaluation": None,
    "steps": 5,
    "checkpoint": {"every": 1, "keep_last": 9},
}
BUDGET: dict[str, Any] = {"max_staleness": 2, "rollout": {"token_budget": 90}}
NEWEST: dict[str, Any] = {"max_staleness": 1, "rollout": {"token_budget": 120, "partial": {"learn": "newest"}}}


def started(folder: Path, name: str = "out", **changes: Any) -> Path:
    run(tiny_run(folder, **merged(RL, changes)), out=folder / name, view=PlainView(io.StringIO()))
    return folder / name


def learned(out: Path, steps: int = 5) -> list[list[Experience]]:
    return [load_experiences(out, step=step) for step in range(1, steps + 1)]


def cut(out: Path, to: Path, *, after: int) -> Path:
    """A copy of a finished run that was killed behind the checkpoint of a step."""
    shutil.copytree(out, to)
    (to / "summary.json").unlink()
    for path in (to / "checkpoints").iterdir():
        if int(path.name.rpartition("-")[2]) > after:
            shutil.rmtree(path)
    return to


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a token budget, and all of its checkpoints."""
    return started(tmp_path_factory.mktemp("whole"), **BUDGET)


def test_groups_are_learned_from_whole_once_and_within_the_bound(whole: Path) -> None:
    batches, rows = learned(whole), read_metrics(whole)
    assert [each.id for batch in batches for each in batch] == [
        f"train-{number:06d}/{index}" for number in range(20) for index in range(4)
    ]
    assert all(each.stop_reason is not StopReason.ABORTED for batch in batches for each in batch)
    assert max(row["staleness/max"] for row in rows) == 2
    assert sum(row["rollout/partial"] for row in rows) == sum(row["rollout/continued"] for row in rows) > 20
    assert max(len(version_segments(each)) for batch in batches for each in batch) >= 2
    assert all(row["rollout/length_bias"] > 0 for row in rows)


def test_every_token_has_the_log_prob_of_the_weights_that_wrote_it(whole: Path) -> None:
    pieced = [each for batch in learned(whole) for each in batch if len(version_segments(each)) > 1]
    compared = require_log_probs(whole, pieced)
    assert min(compared[version] for version in (1, 2)) > 20


def test_cut_into_segments_completions_are_what_they_would_have_been(tmp_path: Path) -> None:
    """With weights that do not change, a budget changes when tokens are generated, and nothing else."""
    still = {"trainer": {"lr": 1e-12}, "steps": 4, "checkpoint": {"every": 10}}
    plain = started(tmp_path, "plain", **still, max_staleness=2)
    parts = started(tmp_path, "parts", **merged(still, BUDGET))
    assert sum(row["rollout/continued"] for row in read_metrics(parts)) > 0
    batches = [chain.from_iterable(learned(each, 4)) for each in (plain, parts)]
    for one, two in zip(*batches, strict=True):
        assert (one.id, one.response, one.stop_reason) == (two.id, two.response, two.stop_reason)
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.reward == two.reward
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)


def test_only_the_newest_segment_is_learned_from(tmp_path: Path) -> None:
    cut_ones = [each for batch in learned(started(tmp_path, **NEWEST)) for each in batch if each.info["segments"] > 1]
    assert cut_ones
    for each in cut_ones:
        mine = np.flatnonzero(each.action_mask)
        assert mine.tolist() == list(range(mine[0], len(each.token_ids))), "the end of the completion"
        assert mine[0] > each.turns[-1].start
        assert len(set(each.versions[mine].tolist())) == 1
        assert (each.logprobs[~each.action_mask] == 0).all()
        assert (each.versions[~each.action_mask] == -1).all()


@pytest.mark.parametrize("after", [1, 3])
def test_resumed_behind_a_checkpoint_a_run_goes_on_with_what_was_put_away(
    whole: Path, tmp_path: Path, after: int
) -> None:
    resumed = cut(whole, tmp_path / "out", after=after)
    resume(resumed, view=PlainView(io.StringIO()))
    assert outcome(resumed) == outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        merged(BUDGET, {"buffer": {"store": "memory"}}),
        pytest.param(NEWEST, marks=pytest.mark.thorough),
        pytest.param(
            merged(NEWEST, {"rollout": {"token_budget": 1}, "pipeline": [{"name": "group_variance"}]}),
            marks=pytest.mark.thorough,
        ),
        pytest.param({"rollout": {"oversample": 0.75}}, marks=pytest.mark.thorough),
        {"rollout": {"oversample": 0.5}, "max_staleness": 1, "taskset": {"sampler": "prioritised"}},
    ],
)
def test_resumed_behind_any_checkpoint_a_run_is_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = started(tmp_path, **changes)
    for after in range(1, 5):
        resumed = cut(whole, tmp_path / f"cut-{after}", after=after)
        resume(resumed, view=PlainView(io.StringIO()))
        assert outcome(resumed) == outcome(whole), f"cut after step {after}"
