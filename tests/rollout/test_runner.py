"""What a workflow's calls and answer come to: branches and steps with rewards of their own, wrong answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.toys import toy_tokenizer

from rollmill.config.rollout import RolloutConfig
from rollmill.engines.base import GenerationRequest
from rollmill.errors import EngineError, WorkflowError
from rollmill.rewards import build_reward_manager
from rollmill.rollout import Explorer
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.policy import Policy
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.rollout.workflow import Workflow, WorkflowFunction
from rollmill.types import Completion, Experience, StopReason, Task

TOKENIZER = toy_tokenizer()
TASK = Task(id="t", prompt="1+1=", answer="2")


class Repeating:
    """An engine whose answers to prompts with an `R` end by repetition; it refuses to be greedy, and then waits."""

    version = 0
    stopped = 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        prompt, ids = np.array(request.prompt_ids, np.int32), np.array([40], np.int32)
        stop = StopReason.REPETITION if "R" in TOKENIZER.decode(prompt) else StopReason.EOS
        zeros = np.zeros(1, np.float32)
        return [Completion(prompt, ids, zeros, ids * 0, zeros, "a", stop, 0, index) for index in range(request.n)]

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        if request.sampling.temperature == 0:
            raise EngineError("not greedy")
        try:
            await asyncio.sleep(60)
        finally:
            self.stopped += 1
        for each in await self.generate(request):
            yield each


def rolled_out(solve: WorkflowFunction, **rollout: Any) -> list[Experience]:
    """One rollout by a workflow."""
    limits = RolloutConfig(**rollout)
    engine: Any = Repeating()
    judge = build_reward_manager([])
    runner = WorkflowRunner(
        RetryingWorkflow(Workflow("solve", solve, {}), limits), engine, ChatRenderer(TOKENIZER, frozenset()), judge
    )
    try:
        return asyncio.run(runner.group(TASK, limits, n=1, seed=0, group="g"))
    finally:
        judge.close()


def test_a_first_branch_with_a_reward_of_its_own_is_another_rollout_than_the_rest() -> None:
    async def solve(task: Task, policy: Policy) -> float:
        policy.reward(await policy.complete("a"), 1.0)
        await policy.complete("b")
        await policy.complete("c")
        return 0.25

    first, *rest = rolled_out(solve)
    assert [one.reward for one in (first, *rest)] == [1.0, 0.25, 0.25]
    assert {one.episode for one in rest}.isdisjoint({first.episode})
    assert len({one.episode for one in rest}) == 1
    assert [one.step_reward for one in (first, *rest)] == [1.0, 0.0, 0.25]


def test_what_the_workflow_returns_belongs_to_the_last_branch_without_a_reward_of_its_own() -> None:
    async def solve(task: Task, policy: Policy) -> float:
        await policy.complete("a")
        policy.reward(await policy.complete("b"), 1.0)
        return 0.25

    assert [one.step_reward for one in rolled_out(solve)] == [0.25, 1.0]


def test_repetition_costs_the_branch_that_repeats() -> None:
    async def solve(task: Task, policy: Policy) -> float:
        for number, prompt in enumerate(("a", "R", "c")):
            policy.reward(await policy.complete(prompt), number)
        return 0.0

    found = rolled_out(solve, repetition={"penalty": 0.5})
    assert [one.reward for one in found] == [one.step_reward for one in found] == [0.0, 0.5, 2.0]
    assert [one.reward_parts["rollout/repetition"] for one in found] == [0.0, -0.5, 0.0]


def test_the_rewards_of_steps_add_up_whatever_a_step_consists_of() -> None:
    """The first step has no call, the second forks, the third has no call again."""

    async def solve(task: Task, policy: Policy) -> float:
        policy.step(0.5)
        await policy.complete("a")
        await policy.complete("b")
        policy.step(1.0, anchor="here")
        policy.step(2.0)
        await policy.complete("R")
        policy.step(4.0)
        return 8.0

    found = rolled_out(solve, repetition={"penalty": 16.0})
    assert [one.step_reward for one in found] == [0.5, 3.0, 4.0 + 8.0 - 16.0]
    assert {one.reward for one in found} == {-0.5}
    assert [one.anchor for one in found] == ["here", "here", None]


def test_a_forked_rollout_without_a_verdict_has_no_step_rewards() -> None:
    async def solve(task: Task, policy: Policy) -> dict[str, float | None]:
        await policy.complete("a")
        await policy.complete("b")
        return {"right": None}

    for one in rolled_out(solve):
        assert one.reward is None
        assert one.step_reward is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((1.0, {"bonus": 1.0}), "of tuples only"),
        ((1.0,), "of tuples only"),
        (float("nan"), "must be a finite number"),
    ],
)
def test_answers_that_are_no_reward_name_the_task(answer: Any, message: str) -> None:
    async def solve(task: Task, policy: Policy) -> Any:
        await policy.complete("a")
        return answer

    with pytest.raises(WorkflowError, match=rf"`solve` failed on task `t`, rollout 0: .*{message}"):
        rolled_out(solve)


@pytest.mark.parametrize("call", ["reward", "step", "foreign"])
def test_rewards_that_cannot_be_learned_from_are_refused(call: str) -> None:
    async def solve(task: Task, policy: Policy) -> float:
        reply = await policy.complete("a")
        if call == "step":
            policy.step(float("inf"))
        other = Policy(Repeating(), ChatRenderer(TOKENIZER, frozenset()), policy.sampling, seed=0, name="frozen")  # type: ignore[arg-type]
        policy.reward(reply if call == "reward" else await other.complete("a"), float("nan") if call == "reward" else 1)
        return 0.0

    said = {
        "reward": "policy.reward was given nan",
        "step": "policy.step was given inf",
        "foreign": "none of this policy",
    }
    with pytest.raises(WorkflowError, match=said[call]):
        rolled_out(solve)


def test_a_rollout_ends_with_its_greedy_one() -> None:
    """Nothing goes on in the background when one of the two fails."""
    engine: Any = Repeating()
    judge = build_reward_manager([])

    async def run() -> None:
        explorer = Explorer(engine, judge, TOKENIZER)
        with pytest.raises(EngineError, match="not greedy"):
            await explorer.rollout(TASK, RolloutConfig(), n=2, seed=0, group="g", with_greedy=True)
        assert engine.stopped == 1

    asyncio.run(run())
    judge.close()


async def _debate(task: Task, policy: Policy) -> float:
    """The proposer's reward is its own; the solver goes on from the proposer's tokens and gets the workflow's."""
    proposer, solver = policy.role("proposer"), policy.role("solver")
    asked = await proposer.complete("a")
    proposer.reward(asked, 3.0)
    await solver.complete(asked.token_ids)
    await solver.complete("b")
    return 0.5


def test_each_role_has_experiences_an_episode_and_a_reward_of_its_own() -> None:
    """Although the solver's prompt continues the proposer's tokens, they are no experience of the solver's."""
    found = rolled_out(_debate)
    assert [(one.role, one.reward) for one in found] == [("proposer", 3.0), ("solver", 0.5), ("solver", 0.5)]
    assert [int(one.action_mask.sum()) for one in found] == [1, 1, 1]
    first, *rest = [one.episode for one in found]
    assert len(set(rest)) == 1
    assert first not in rest
    assert [one.step_reward for one in found] == [3.0, 0.0, 0.5]


def test_roles_without_rewards_are_separate_episodes_with_the_workflows() -> None:
    async def solve(task: Task, policy: Policy) -> float:
        for name in ("white", "black"):
            await policy.role(name).complete(name)
        return 0.25

    found = rolled_out(solve)
    assert [(one.role, one.reward, one.step_reward) for one in found] == [
        ("white", 0.25, 0.25), ("black", 0.25, 0.25),
    ]  # fmt: skip
    assert len({one.episode for one in found}) == 2


def test_a_role_is_one_object_and_draws_other_numbers_than_another() -> None:
    seeds = []

    async def solve(task: Task, policy: Policy) -> float:
        assert policy.role("white") is policy.role("white")
        seeds.extend([policy.seed, policy.role("white").seed, policy.role("black").seed])
        await policy.complete("a")
        return 0.0

    rolled_out(solve)
    rolled_out(solve)
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(("wrong", "says"), [
    (lambda policy: policy.role("a").role("b"), "within the role `a`"),
    (lambda policy: policy.role(""), "only letters"),
    (lambda policy: policy.role("a/b"), "'a/b'.*only letters"),
    (lambda policy: policy.role("a b"), "only letters"),
    (lambda policy: policy.role("a").step(1.0), "not both"),
    (lambda policy: (policy.step(1.0), policy.role("a")), "not both"),
])  # fmt: skip
def test_wrong_uses_of_roles_are_refused(wrong: Any, says: str) -> None:
    async def solve(task: Task, policy: Policy) -> float:
        wrong(policy)
        return 0.0

    with pytest.raises(WorkflowError, match=says):
        rolled_out(solve)
