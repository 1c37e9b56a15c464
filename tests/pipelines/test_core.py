"""Batches, reports and the pipeline itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from support.made_up import context, group, ids, pipeline, rollout, section

from rollmill.errors import DeadlineError, PipelineError
from rollmill.pipelines import Batch, Pipeline
from rollmill.types import Experience, ExperienceSource


def run(made: Pipeline, experiences: list[Any]) -> list[Any]:
    return asyncio.run(made.process(experiences, context()))


def test_what_is_dropped_is_counted_once_and_with_its_reason() -> None:
    first, second = group([1.0, 0.0])
    batch = Batch([first, second], context())
    batch.drop(first, "too long")
    assert ids(batch.experiences) == ["g0/1"]
    assert (batch.report.seen, batch.report.kept, batch.report.dropped) == (2, 1, 1)
    assert batch.report.reasons == {"too long": 1}
    with pytest.raises(ValueError, match="g0/0 cannot be dropped: it is not in the batch"):
        batch.drop(first, "too long")


def test_an_experience_that_is_added_and_dropped_leaves_no_trace() -> None:
    batch = Batch(group([1.0]), context())
    new = rollout(index=5)
    batch.add(new, "made")
    batch.drop(new, "after all not")
    assert (batch.report.kept, batch.report.added, batch.report.dropped) == (1, 0, 0)


def test_an_id_is_added_once() -> None:
    batch = Batch(group([1.0]), context())
    with pytest.raises(ValueError, match="g0/0 is added twice"):
        batch.add(rollout(index=0), "made")


def test_what_is_added_has_arrays_of_one_length() -> None:
    batch, wrong = Batch(group([1.0]), context()), rollout(index=1, length=3)
    wrong.action_mask = wrong.action_mask[:-1]
    with pytest.raises(ValueError, match=r"g0/1 has arrays of different lengths \(token_ids 17, action_mask 16, "):
        batch.add(wrong, "made")


def test_an_operator_that_never_ends_is_named() -> None:
    async def asks_a_server(batch: Batch) -> None:
        await asyncio.Event().wait()

    made = Pipeline([("asks_a_server", asks_a_server)])
    with pytest.raises(DeadlineError, match=r"the pipeline waited .* for operator `asks_a_server` on task t0\. Look"):
        asyncio.run(made.process(group([1.0]), context(deadline_s=0.02)))


def test_an_operator_s_own_timeout_is_its_error() -> None:
    async def impatient(batch: Batch) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    with pytest.raises(PipelineError, match=r"operator `impatient` failed .*TimeoutError"):
        run(Pipeline([("impatient", impatient)]), group([1.0]))


def test_an_experience_changed_twice_counts_as_one() -> None:
    [experience] = group([1.0])
    batch = Batch([experience], context())
    batch.change(experience, "shaped")
    batch.change(experience, "masked")
    assert batch.report.changed == 1
    assert batch.report.numbers() == {"kept": 1, "changed": 1, "dropped": 0, "added": 0, "shaped": 1, "masked": 1}


def test_operators_of_one_name_are_told_apart() -> None:
    made = pipeline(
        {"name": "reward_filter", "at_least": 0.5}, "invalid_reward", {"name": "reward_filter", "at_most": 0.9}
    )
    assert ids(run(made, group([0.0, 0.6, 1.0, None]))) == ["g0/1"]
    reports = made.take_reports()
    assert {name: report.dropped for name, report in reports.items()} == {
        "reward_filter": 1,
        "invalid_reward": 1,
        "reward_filter-2": 1,
    }
    assert all(report.seen == 0 for report in made.take_reports().values())


def test_an_operator_that_raises_names_itself_the_task_and_the_line() -> None:
    def broken(batch: Batch) -> None:
        raise KeyError("colour")

    with pytest.raises(PipelineError) as caught:
        run(Pipeline([("broken", broken)]), group([1.0], task="t7"))
    line = broken.__code__.co_firstlineno + 1
    text = f"operator `broken` failed on experiences of task t7: KeyError: 'colour' ({__file__}:{line}); correct it"
    assert text in str(caught.value)


def test_an_operator_that_returns_something_is_an_error() -> None:
    def filtered(batch: Batch) -> Any:
        return [each for each in batch.experiences if each.reward]

    async def later(batch: Batch) -> Any:
        return 1

    def lazy(batch: Batch) -> Any:  # its body would never run
        yield batch.drop(batch.experiences[0], "lazy")

    for operator, kind in ((filtered, "list"), (later, "int"), (lazy, "generator")):
        with pytest.raises(PipelineError, match=f"returned a {kind}; an operator changes its batch"):
            run(Pipeline([("mine", operator)]), group([1.0]))


class Counts:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.closed = False

    async def __call__(self, batch: Batch) -> None:
        self.seen += ids(batch.experiences)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    def close(self) -> None:
        self.closed = True


def test_a_state_is_a_copy_that_later_batches_do_not_change() -> None:
    operator = Counts()
    made = Pipeline([("counts", operator)])
    run(made, group([1.0]))
    state = made.state_dict()
    run(made, group([1.0], name="g1"))
    assert state == {"counts": {"seen": ["g0/0"]}}
    again = Counts()
    Pipeline([("counts", again)]).load_state_dict(state)
    assert again.seen == ["g0/0"]
    made.close()
    assert operator.closed


def test_a_state_that_json_cannot_hold_names_the_operator() -> None:
    operator = Counts()
    operator.seen = {1, 2}  # type: ignore[assignment]
    with pytest.raises(PipelineError, match="state_dict of operator `counts` gives what JSON cannot hold"):
        Pipeline([("counts", operator)]).state_dict()


def test_all_operators_are_closed_even_if_one_fails_to() -> None:
    class Fails(Counts):
        def close(self) -> None:
            raise OSError("stuck")

    first, last = Counts(), Counts()
    with pytest.raises(OSError, match="stuck"):
        Pipeline([("a", first), ("b", Fails()), ("c", last)]).close()
    assert first.closed
    assert last.closed


def demonstration(text: str, index: int = 0) -> Experience:
    found = rollout(None, index=index, group=f"x{index}", text=text, parts={}, outcomes={})
    found.source = ExperienceSource.EXPERT
    return found


def test_operators_see_the_sources_that_they_take() -> None:
    seen: list[str] = []

    def looks(batch: Batch) -> None:
        seen.extend(each.source for each in batch.experiences)

    usual, given = frozenset({ExperienceSource.ROLLOUT}), [*group([1.0, 0.0]), demonstration("it is 12")]
    assert run(Pipeline([("looks", looks)], [usual]), given) == given
    assert run(Pipeline([("looks", looks)]), given) == given
    assert seen == ["usual", "usual", "usual", "usual", "expert"]
    for name in ("invalid_reward", "group_variance"):  # they compare rewards, and demonstrations have none
        assert run(pipeline(name), given) == given
    with pytest.raises(ValidationError, match="`group_variance` cannot act on expert experiences; it can on usual"):
        section(name="group_variance", sources=["expert"])


@pytest.mark.parametrize(
    "operator",
    [
        {"name": "length_filter", "at_most": 10},
        {"name": "check", "reward": {"name": "format", "pattern": "12$"}},
    ],
)
def test_filters_of_texts_filter_demonstrations(operator: dict[str, Any]) -> None:
    given = [
        demonstration("it is 12", 0),
        demonstration("it is no number at all", 1),
        *group([1.0], text="no, at least 7"),
    ]
    assert ids(run(pipeline(operator), given)) == ["x0/0"]
    assert ids(run(pipeline({**operator, "sources": ["usual"]}), given)) == ["x0/0", "x1/1"]
    assert ids(run(pipeline({**operator, "sources": ["expert"]}), given)) == ["x0/0", "g0/0"]


def test_a_pair_that_loses_one_side_is_dropped() -> None:
    pairs = [rollout(float(n % 2), index=n, group=f"p{n // 2}", text=f"it is {n}") for n in range(4)]
    for each in pairs:
        each.source = ExperienceSource.PREFERENCE

    def drops(batch: Batch) -> None:
        batch.drop(batch.experiences[0], "wrong")

    made = Pipeline([("drops", drops)])
    assert ids(run(made, pairs)) == ["p1/2", "p1/3"]
    assert made.take_reports()["drops"].reasons == {"wrong": 1, "other of a pair": 1}
