"""The math reward by the settings of the run file and of a task; answers themselves are tested in libs/grading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from pydantic import ValidationError
from support.reward_helpers import completion, judged, task

from rollmill.errors import GraderLostError, RewardError, is_recoverable
from rollmill.rewards import RewardManager, build_reward_manager
from rollmill.rewards.base import Score
from rollmill.rewards.builtin.math import MathReward
from rollmill.rewards.resources import RewardResources
from rollmill.types import Task


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardManager]:
    with build_reward_manager([MathReward(name="math")]) as judge:
        yield judge


def box(text: str) -> str:
    return f"So the answer is $\\boxed{{{text}}}$."


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("42", "The answer is 42 apples.", 1.0),
        (r"2\sqrt{3}", box(r"\sqrt{12}"), 1.0),
        (r"2\sqrt{3}", box(r"\sqrt{13}"), 0.0),
        ("Work: 2 + 2.\n#### 4", "I count four: 4", 1.0),
        ("12", "<think>It is 12.</think>So it is 13.", 0.0),
        ("12", "<think>It is 13.</think>So it is 12.", 1.0),
        ("12", "答案是十二个", 1.0),
    ],
)
def test_an_answer_earns_one_or_nothing(judge: RewardManager, gold: str, text: str, reward: float) -> None:
    assert judged(judge, gold, text).reward == reward


def test_a_task_without_an_answer_is_not_judged(judge: RewardManager) -> None:
    found = judged(judge, None, "5")
    assert (found.reward, found.parts, found.outcomes) == (None, {"math": None}, {"math": "not_applicable"})


def test_an_answer_that_is_no_answer_is_refused(judge: RewardManager) -> None:
    with pytest.raises(RewardError, match=r"reward `math` failed on task `t1`: TypeError: the task's answer is \[5\]"):
        judged(judge, [5], "5")


@pytest.mark.parametrize("answer", ["", "  "])
def test_an_empty_reference_is_an_error(judge: RewardManager, answer: str) -> None:
    with pytest.raises(RewardError, match="the task's answer is empty"):
        judged(judge, answer, r"\boxed{}")


def test_an_unfinished_reasoning_has_no_answer(judge: RewardManager) -> None:
    found = judged(judge, "5", "<think>\\boxed{5}")
    assert (found.reward, found.outcomes) == (0.0, {"math": "no_answer"})


@pytest.mark.slow
def test_an_endless_answer_earns_the_reward_of_a_timeout() -> None:
    reward = MathReward(name="math", time_limit_s=1.0, timeout_reward=-0.25)
    with build_reward_manager([reward]) as judge:
        # a reference of the same form lifts the cap on cost, so that the grader process has to be ended
        found = judged(judge, "9^{9^{9^{8}}}", box("9^{9^{9^{9}}}"))
        assert (found.reward, found.outcomes) == (-0.25, {"math": "timeout"})
        found = judged(judge, r"\sqrt{2}", box("9^{9^{9^{9}}}"))
        assert (found.reward, found.outcomes) == (0.0, {"math": "too_costly"})


def test_only_a_formula_is_waited_for() -> None:
    resources = RewardResources()
    scorer = MathReward(name="math").prepare(resources)
    quick = scorer.begin(task("5"), completion("The answer is 5."))
    assert quick == Score(1.0)
    assert resources.graders.pids() == []

    async def formula() -> Score:
        begun = scorer.begin(task(r"2\sqrt{3}"), completion(box(r"\sqrt{12}")))
        assert not isinstance(begun, Score)
        return await begun

    found = asyncio.run(formula())
    assert (found.value, found.outcome) == (1.0, "ok")
    assert found.run_s is not None
    resources.close()


def test_a_run_may_start_again_after_the_loss_of_grader_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill_grading import grader_pool

    def die(*arguments: object) -> None:
        raise grader_pool.WorkerDiedError("exit status -9")

    monkeypatch.setattr(grader_pool.WorkerProcess, "call", die)
    with (
        build_reward_manager([MathReward(name="math")]) as judge,
        pytest.raises(
            RewardError, match=r"^reward `math` failed on task `t1`: the math grader died twice on this answer \(exit"
        ) as raised,
    ):
        judged(judge, r"2\sqrt{3}", box(r"\sqrt{12}"))
    assert isinstance(raised.value.__cause__, GraderLostError)
    assert is_recoverable(raised.value)


@pytest.mark.parametrize("column", ["options", "choices"])
def test_options_are_a_column(judge: RewardManager, column: str) -> None:
    by_letter = {"A": "11", "B": "12"}
    for options in (by_letter, list(by_letter.values())):
        assert judged(judge, "B", r"\boxed{12}", **{column: options}).reward == 1.0
        assert judged(judge, "B", r"\boxed{11}", **{column: options}).reward == 0.0


@pytest.mark.parametrize(
    ("question", "reward"),
    [("Given $x + y = 7$ and $xy = 12$, find $x^2 + y^2$.", 1.0), ("Which circle has radius 5?", 0.0)],
)
def test_the_prompt_is_the_question(judge: RewardManager, question: str, reward: float) -> None:
    for prompt in (question, [{"role": "user", "content": question}]):
        found = asyncio.run(judge.score(Task("t", prompt, "25"), completion("So $x^2+y^2=25$.")))
        assert found.reward == reward


def test_tolerance_and_units_are_settings_of_the_reward_or_of_the_task(judge: RewardManager) -> None:
    with build_reward_manager([MathReward(name="math", tolerance=1e-3, units="required")]) as strict:
        pairs = [("1/3", "0.3333"), ("1/3", "0.33"), ("5 m", "500 cm"), ("5 m", "5")]
        assert [judged(strict, gold, box(answer)).reward for gold, answer in pairs] == [1.0, 0.0, 1.0, 0.0]
    assert judged(judge, "5 m", box("5")).reward == 1.0
    assert judged(judge, "5 m", box("5"), math={"units": "required"}).reward == 0.0
    assert judged(judge, "1/3", box("0.3333"), math={"tolerance": 0.01}).reward == 1.0
    with pytest.raises(RewardError, match=r"the task's column `math` has \['unit'\]; extract, tolerance and units"):
        judged(judge, "5 m", box("5"), math={"unit": "required"})


def test_the_place_of_the_answer_is_chosen_by_taskset_and_by_task() -> None:
    text = "\\boxed{1} #### 2\nand 3"
    config = MathReward(name="math", extract_by_taskset={"hashed": "hash", "plain": "last_number"})
    assert [config.of_task(name, {}).extract for name in ("hashed", "plain", "other")] == [
        "hash",
        "last_number",
        "auto",
    ]
    with build_reward_manager([config]) as judge:
        assert judged(judge, "1", text).reward == 1.0
        assert judged(judge, "3", text, math={"extract": "last_number"}).reward == 1.0
    with pytest.raises(ValidationError, match="extract_by_taskset"):
        MathReward(name="math", extract_by_taskset={"hashed": "end"})  # type: ignore[dict-item]
