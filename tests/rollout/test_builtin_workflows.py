"""The built-in workflows, each with a policy that says what it is told to, and the real judge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.scripted import Scripted
from support.toys import toy_tokenizer

from rollmill.config.rewards import RewardManagerConfig
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.config.workflows import CompactionConfig, WorkflowSection
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.exact import ExactReward
from rollmill.rewards.grading import completion_from_text
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.environments.base import StepResult
from rollmill.rollout.resources import WorkflowResources, build_workflow
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.rollout.tools.builtin.calculator import CalculatorTool
from rollmill.rollout.workflow import Rollout
from rollmill.rollout.workflows.environment import EnvironmentWorkflow
from rollmill.rollout.workflows.few_shot import FewShotWorkflow
from rollmill.rollout.workflows.judged import JudgedWorkflow
from rollmill.rollout.workflows.react import ReActWorkflow, parse_action
from rollmill.rollout.workflows.reflection import ReflectionWorkflow
from rollmill.rollout.workflows.tools import ToolWorkflow
from rollmill.rollout.workflows.vote import VoteWorkflow, majority_vote
from rollmill.types import Experience, Task

CHAT = Task("t", [{"role": "user", "content": "17*23?"}], answer="391")
PLAIN = Task("t", "17*23?\n", answer="391")
CALL = '{"tool": "calculator", "args": {"expression": "17*23"}}'


def rolled(
    section: WorkflowSection,
    task: Task,
    *lines: str,
    models: Mapping[str, Any] | None = None,
    examples: list[Task] | None = None,
    room: int = 10**6,
    n: int = 1,
) -> tuple[list[Experience], Scripted]:
    """The experiences of a group, and what the policy was asked."""
    tokenizer = toy_tokenizer()
    chat = ChatRenderer(tokenizer, frozenset([tokenizer.eos_token_id]))
    engine = Scripted(chat, *lines, room=room)
    judge = build_reward_manager([ExactReward(name="exact")], RewardManagerConfig(), tokenizer=tokenizer)
    resources = WorkflowResources(judge, tools=[CalculatorTool()], models=models, examples=examples or [])
    workflow = build_workflow(section, resources)
    assert workflow is not None
    runner = WorkflowRunner(RetryingWorkflow(workflow, RolloutConfig()), engine, chat, judge)  # type: ignore[arg-type]

    async def run() -> list[Experience]:
        try:
            return await runner.group(task, SamplingConfig(), n=n, seed=1, group="g")
        finally:
            await resources.close()

    try:
        return asyncio.run(run()), engine
    finally:
        judge.close()


# -- tools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_tools_are_called_until_a_turn_makes_no_call(task: Task) -> None:
    [one], engine = rolled(ToolWorkflow(format="json"), task, CALL, "391")
    assert one.reward == 1
    assert [turn.role for turn in one.turns] == ["prompt", "assistant", "observation", "assistant"]
    assert "391" in one.turns[2].text
    assert '"name": "calculator"' in engine.prompts()[0]
    assert one.turns[1].text == CALL


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_a_long_conversation_goes_on_from_its_summary(task: Task) -> None:
    compaction = CompactionConfig(at_tokens=1, instruction="Summarise.", opening="So far: {summary}", learn=False)
    section = ToolWorkflow(format="json", compaction=compaction)
    [before, after], engine = rolled(section, task, CALL, "it is 391 ", "391")
    asked = engine.prompts()
    assert "Summarise." in asked[1]
    assert CALL in asked[1]
    assert "So far: it is 391" in asked[2]
    assert CALL not in asked[2]
    assert "17*23?" in asked[2]
    assert '"name": "calculator"' in asked[2]
    assert [turn.text for turn in before.turns if turn.role == "assistant"] == [CALL, "it is 391 "]
    assert before.token_ids[: len(engine.requests[1].prompt_ids)].tolist() == list(engine.requests[1].prompt_ids)
    learned = [bool(before.action_mask[turn.start : turn.end].all()) for turn in before.turns]
    assert learned == [turn.text == CALL for turn in before.turns], "the summary is not trained"
    assert (after.turns[-1].text, after.reward, before.reward) == ("391", 1.0, 1.0)
    assert before.episode == after.episode


def test_a_conversation_without_room_for_a_summary_ends() -> None:
    section = ToolWorkflow(format="json", compaction=CompactionConfig(at_tokens=1))
    _, engine = rolled(section, CHAT, "391")
    [one], engine = rolled(section, CHAT, CALL, room=len(engine.requests[0].prompt_ids))
    assert len(engine.requests) == 1
    assert one.reward == 0


def test_tools_need_not_be_described() -> None:
    _, engine = rolled(ToolWorkflow(format="json", describe=False), CHAT, CALL, "391")
    assert "calculator" not in engine.prompts()[0]


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_what_is_wrong_with_a_call_is_told_and_costs(task: Task) -> None:
    lines = ('{"tool": "calculator", "args": {', '{"tool": "abacus", "args": {}}', CALL.replace("17", "1/0*"), "391")
    [one], _ = rolled(ToolWorkflow(malformed_penalty=0.125), task, *lines)
    told = " ".join(turn.text for turn in one.turns if turn.role == "observation")
    assert "a call that cannot be read (not JSON" in told
    assert "there is no tool `abacus`" in told
    assert "division by zero" in told
    assert one.reward_parts == {"exact": 1.0, "malformed_calls": -0.375}
    assert one.reward == 0.625


def test_calls_of_the_last_turn_are_not_answered() -> None:
    [one], engine = rolled(ToolWorkflow(turns=2), CHAT, CALL, CALL)
    assert one.reward == 0
    assert len(engine.requests) == 2


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
@pytest.mark.parametrize("name", ["tools", "react"])
def test_a_conversation_that_outgrows_the_context_ends(task: Task, name: str) -> None:
    section = ToolWorkflow(describe=False) if name == "tools" else ReActWorkflow(describe=False)
    line = CALL if name == "tools" else "Action: calculator\nAction Input: 1\nObservation:"
    [one], _ = rolled(section, task, line, room=30)
    assert one.reward == 0
    with pytest.raises(WorkflowError, match="the prompt is too long"):
        rolled(section, task, line, room=1)


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_a_call_that_cannot_be_read_is_an_error_in_the_last_turn_and_no_answer(task: Task) -> None:
    broken = '<tool_call>\n{"name": "calculator", "arguments": {\n</tool_call>'
    section = ToolWorkflow(malformed_penalty=0.125, turns=2)
    [one], _ = rolled(section, replace(task, answer=broken), broken, broken)
    assert one.reward_parts == {"exact": 0.0, "malformed_calls": -0.25}
    assert one.parsed_reply.content == ""


# -- react -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_react_is_one_text_with_observations(task: Task) -> None:
    first = "Thought: I compute.\nAction: calculator\nAction Input: 17*23\nObservation:"
    [one], engine = rolled(ReActWorkflow(), task, first, "Thought: I know.\nFinal Answer: 391")
    assert one.reward == 1
    assert [turn.role for turn in one.turns] == ["prompt", "assistant", "observation", "assistant"]
    assert one.turns[2].text == " 391\n"
    assert "Action: one of calculator" in engine.prompts()[0]
    assert engine.prompts()[1].endswith(f"{first} 391\n")


def test_react_tells_of_turns_without_an_action() -> None:
    lines = ("Hm.\nObservation:", "Action: calculator\nAction Input: [1]\nObservation:", "391")
    [one], _ = rolled(ReActWorkflow(malformed_penalty=0.25), PLAIN, *lines)
    told = [turn.text for turn in one.turns if turn.role == "observation"]
    assert "a turn ends with `Action:`" in told[0]
    assert "expression: Input should be a valid string" in told[1] or "not arithmetic" in told[1]
    assert one.reward_parts == {"exact": 1.0, "malformed_calls": -0.5}


def test_actions_in_text() -> None:
    from rollmill.rollout.tools.pool import ToolPool

    async def toolbox() -> Any:
        rollout: Any = Rollout("g/0", PLAIN, "g", 0, 0, 0, None, None, None)  # type: ignore[arg-type]
        async with ToolPool([CalculatorTool()]).one(rollout) as tools:
            return tools

    tools = asyncio.run(toolbox())
    for text in ('Action: calculator\nAction Input: {"expression": "1"}', "Action: calculator \n Action Input: 1\n"):
        assert (parse_action(text, tools).name, parse_action(text, tools).arguments) == (
            "calculator",
            {"expression": "1"},
        )
    twice = "Action: a\nAction Input: {}\nAction: b\nAction Input: {}"
    assert parse_action(twice, tools).name == "b"
    assert "no JSON object" in parse_action("Action: a\nAction Input: x", tools).wrong


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_actions_and_answers_within_reasoning_are_none(task: Task) -> None:
    first = "<think>\nAction: abacus\n</think>\nAction: calculator\nAction Input: 17*23\nObservation:"
    [one], _ = rolled(ReActWorkflow(), task, first, "<think>Final Answer: 390</think>Final Answer: 391")
    assert [turn.text for turn in one.turns if turn.role == "observation"] == [" 391\n"]
    assert one.reward == 1
    [cut], _ = rolled(ReActWorkflow(), task, "<think>Final Answer: 391")
    assert cut.reward == 0


# -- environment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_an_action_has_no_reasoning(task: Task) -> None:
    actions: list[str] = []

    class Once:
        async def reset(self) -> str:
            return ""

        async def step(self, action: str) -> StepResult:
            actions.append(action)
            return StepResult("Go on.", 0.5, len(actions) == 2)

    @asynccontextmanager
    async def source(rollout: Rollout) -> Any:
        yield Once()

    [one], _ = rolled(
        EnvironmentWorkflow(), task, "<think>left?</think>right", "<think>left", models={"environment": source}
    )
    assert (actions, one.reward) == (["right", ""], 1.0)


# -- few-shot, reflection, vote, judged ------------------------------------------------------------------------

WORKED = [Task(f"w{n}", f"{n}*2?\n", answer=str(2 * n), response=str(2 * n)) for n in range(9)]


def test_examples_stand_in_front_and_never_are_the_task_itself() -> None:
    task = WORKED[4]
    own_again = Task("copy", task.prompt, response="8")
    section = FewShotWorkflow(count=8, separator="\n")
    found, engine = rolled(section, task, "8", "8", examples=[*WORKED, own_again], n=2)
    prompt = engine.prompts()[0]
    assert prompt.endswith("4*2?\n")
    assert prompt.count("?") == 9
    assert prompt.count("4*2?") == 1
    assert "3*2?\n6\n" in prompt
    assert engine.prompts()[1] == prompt
    assert [one.reward for one in found] == [1, 1]


def test_examples_of_a_chat_are_turns() -> None:
    given = [{"prompt": f"{n}?", "response": f"r{n}"} for n in range(2)]
    task = Task("t", [{"role": "system", "content": "S"}, {"role": "user", "content": "17*23?"}], answer="391")
    section = FewShotWorkflow.model_validate({"examples": given, "count": 2, "choose": "first"})
    [one], engine = rolled(section, task, "391")
    expected = ["system:\nS", "user:\n0?", "assistant:\nr0", "user:\n1?", "assistant:\nr1", "user:\n17*23?"]
    places = [engine.prompts()[0].index(each) for each in expected]
    assert places == sorted(places)
    assert one.reward == 1


def test_too_few_examples_are_an_error() -> None:
    with pytest.raises(WorkflowError, match=r"shows 3 examples, and there are 1 .*response_template"):
        rolled(FewShotWorkflow(), WORKED[0], "0", examples=WORKED[:2])


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_wrong_answers_are_given_again(task: Task) -> None:
    [one], engine = rolled(ReflectionWorkflow(retries=3, discount=0.5), task, "390", "392", "391")
    assert one.reward == 0.25
    assert one.reward_parts == {"exact": 1.0, "retries": -0.75}
    assert "That is not right." in engine.prompts()[1]
    [one], engine = rolled(ReflectionWorkflow(), task, "391")
    assert (one.reward, len(engine.requests)) == (1, 1)


def test_the_policy_may_criticise_itself() -> None:
    section = ReflectionWorkflow(critic="self", retries=2)
    [one], _ = rolled(section, CHAT, "390", "no, 7*3 is 21", "391", "Yes.")
    assert one.reward == 1
    assert len([turn for turn in one.turns if turn.role == "assistant"]) == 4
    assert all(one.action_mask[turn.start : turn.end].all() for turn in one.turns if turn.role == "assistant")


def test_a_verdict_on_oneself_comes_after_the_reasoning() -> None:
    section = ReflectionWorkflow(critic="self", retries=2)
    thought = "<think>\nno, 7*3 is 21, so yes\n</think>\n\nYes."
    [one], engine = rolled(section, CHAT, "391", thought)
    assert (one.reward, len(engine.requests)) == (1, 2)
    [one], engine = rolled(section, CHAT, "390", "<think>yes?</think>No.", "391", "yes")
    assert (one.reward, len(engine.requests)) == (1, 4)


def test_votes_are_on_answers_without_reasoning() -> None:
    lines = ("<think>so 1</think>so 391", "<think>so 2</think>so 391", "<think>so 391", "so 390")
    found, _ = rolled(VoteWorkflow(samples=4, after="so"), CHAT, *lines)
    assert [one.reward for one in found] == [1, 1, 0, 0]


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
def test_votes_are_experiences_with_rewards_of_their_own(task: Task) -> None:
    lines = ("so 391", "so 390", "so 391", "hm")
    found, _ = rolled(VoteWorkflow(samples=4, after="so"), task, *lines)
    assert [one.reward for one in found] == [1, 0, 1, 0]
    assert len({one.episode for one in found}) == 4
    assert {one.group for one in found} == {"g"}
    shared, _ = rolled(VoteWorkflow(samples=2, reward="winner"), task, "391", "390")
    assert [one.reward for one in shared] == [1, 1]
    assert len({one.episode for one in shared}) == 1


def test_answers_that_are_voted_on() -> None:
    section = VoteWorkflow(pattern=r"(\d+) apples")
    assert section.extract("3 apples, no, 4 apples") == "4"
    assert section.extract("none") is None
    assert VoteWorkflow().extract("  A  b ") == "a b"
    assert majority_vote(["a", "b", None, "b", "a"]) == "a"
    assert majority_vote([None, None]) is None


def test_a_pattern_that_takes_too_long_finds_nothing() -> None:
    assert VoteWorkflow(pattern="(.*?,){20}P").extract("1," * 60) is None


def test_spaces_without_end_are_no_action() -> None:
    """What was read in cubic time: 20,000 spaces took hours."""
    nobody: Any = None
    assert parse_action("Action:" + " " * 20_000, nobody).wrong


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (ReflectionWorkflow(), "critic: rewards"),
        (ReflectionWorkflow(critic="self", discount=0.5), "discount"),
    ],
)
def test_reflection_refuses_rewards_that_come_too_late(section: ReflectionWorkflow, key: str) -> None:
    judge: Any = SimpleNamespace(groupwise=True)
    with pytest.raises(ConfigError, match=f"workflow.{key}: a reward is wanted before the rollout ends"):
        build_workflow(section, WorkflowResources(judge))
    assert build_workflow(ReflectionWorkflow(critic="self"), WorkflowResources(judge)) is not None


class Scorer:
    """Stands for a model that scores."""

    def __init__(self, says: str) -> None:
        self._says, self.asked = says, ""

    async def chat(self, messages: Any) -> Any:
        self.asked = messages[0]["content"]
        return SimpleNamespace(text=self._says, completion=completion_from_text(PLAIN, self._says))


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        ("Good. 7", 0.7),
        ("10/10... 12", None),
        ("no", None),
        ("2.5", 0.25),
        ("<think>2?</think>Good. 7", 0.7),
        ("<think>7", None),
    ],
)
def test_another_model_scores(says: str, reward: float | None) -> None:
    scorer = Scorer(says)

    @asynccontextmanager
    async def source(rollout: Rollout) -> Any:
        yield scorer

    [one], _ = rolled(JudgedWorkflow(), CHAT, "<think>\nhm\n</think>\n{prompt} 391", models={"scorer": source})
    assert one.reward == reward
    assert "Request:\n17*23?\n" in scorer.asked
    assert "Response:\n{prompt} 391" in scorer.asked  # what a policy writes is not filled in
