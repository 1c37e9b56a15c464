"""The pacing rule: what it promises about staleness, and that it never stops a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmill.orchestrator.pacing import Pacing


@given(
    batch=st.integers(1, 9),
    max_staleness=st.integers(0, 5),
    steps=st.integers(1, 12),
    eager=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_every_batch_is_trained_on_and_none_is_too_stale(
    batch: int, max_staleness: int, steps: int, eager: list[bool]
) -> None:
    """Rollouts start whenever the rule and a random scheduler allow; the oldest batch is trained on in order."""
    pacing = Pacing(batch, max_staleness, steps)
    started_at: list[int] = []  # version each rollout began with
    version, turn = 0, 0
    while version < steps:
        turn += 1
        needed = len(started_at) < (version + 1) * batch
        while pacing.may_start(version, len(started_at) - version * batch) and (needed or eager[turn % len(eager)]):
            started_at.append(version)
            needed = len(started_at) < (version + 1) * batch
        mine = started_at[version * batch : (version + 1) * batch]
        assert len(mine) == batch, "the rule starves the trainer"
        assert 0 <= version - min(mine) <= max_staleness
        version += 1
    assert len(started_at) == steps * batch
    assert not pacing.may_start(version, 0)


@given(batch=st.integers(1, 9), max_staleness=st.integers(0, 5), version=st.integers(0, 20))
def test_as_many_rollouts_start_as_staleness_allows(batch: int, max_staleness: int, version: int) -> None:
    pacing, ahead = Pacing(batch, max_staleness, steps=10**6), 0
    while pacing.may_start(version, ahead):
        assert pacing.step_of(version, ahead) == (version * batch + ahead) // batch
        ahead += 1
    assert ahead == (max_staleness + 1) * batch
