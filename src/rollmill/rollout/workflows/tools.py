"""Workflow `tools`: the policy calls tools until it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from rollmill.config.workflows import CompactionConfig, WorkflowSection
from rollmill.errors import ContextLengthError
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.rewards import RewardResult
    from rollmill.rollout.policy import Policy, Reply
    from rollmill.rollout.tools.toolbox import Toolbox
    from rollmill.rollout.workflow import RolloutScorer, WorkflowResult


class ToolWorkflowSection(WorkflowSection):
    """Keys of workflows that call tools."""

    uses_tools: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    turns: int = Field(8, ge=1)
    """Maximum turns of the policy. Tool calls of the last turn are not executed."""
    describe: bool = True
    """Describe the tools to the policy. Set to false for policies trained with them."""
    malformed_penalty: float = Field(0.0, ge=0)
    """Penalty for each call that cannot be parsed, has wrong arguments or fails; logged as the part
    `malformed_calls`."""

    def less_penalty(self, judgement: RewardResult, tools: Toolbox) -> WorkflowResult:
        """Subtract the penalty of failed calls from the rewards."""
        if not self.malformed_penalty:
            return judgement
        return judgement, {"malformed_calls": -self.malformed_penalty * tools.errors}


class ToolWorkflow(ToolWorkflowSection):
    """The policy calls tools until a turn has no call: that turn is the answer, scored by `rewards`."""

    plain_keys: ClassVar[tuple[str, ...]] = ("result",)

    name: Literal["tools"] = "tools"
    format: Literal["auto", "hermes", "json"] = "auto"
    """Syntax of calls. `auto`: the model's own, as its chat template writes it; without one, and in plain prompts,
    within `<tool_call>` tags if there are any, else JSON. `hermes`: within these tags. `json`: as JSON. With another
    one than the model's own, tools are described in the system message."""
    result: str = "\n<tool_response>\n{result}\n</tool_response>\n"
    """Template of a tool result in plain prompts (no chat), with the placeholder {result}."""
    compaction: CompactionConfig | None = None
    """Summaries in place of a conversation that has become long; null: the last turn counts when the context is
    full."""

    @field_validator("result")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if "{result}" not in value:
            raise ValueError("the place {result} is missing")
        return value

    async def solve(self, task: Task, policy: Policy, judge: RolloutScorer, tools: Toolbox) -> WorkflowResult:
        """Return the rewards of the last turn, less the penalty."""
        reply = await (self._in_text if isinstance(task.prompt, str) else self._in_chat)(task, policy, tools)
        return self.less_penalty(await judge(reply), tools)

    async def _in_chat(self, task: Task, policy: Policy, tools: Toolbox) -> Reply:
        from rollmill.rollout.policy import PolicyConversation

        dialogue, reply = PolicyConversation(policy, task.prompt, self.compaction), None
        options: dict[str, Any] = {
            "tools": tools.descriptions if self.describe else None,
            "tool_format": self.format,
        }
        for turn in range(self.turns):
            try:
                if reply is not None:
                    await dialogue.compact(reply, **options)
                reply = await dialogue.ask(**options)
            except ContextLengthError:
                if reply is None:
                    raise
                break
            if self._is_last(turn, reply, reply.malformed, tools) or not (reply.tool_calls or reply.malformed):
                break
            dialogue.messages += await tools.answer(reply)
        assert reply is not None
        return reply

    async def _in_text(self, task: Task, policy: Policy, tools: Toolbox) -> Reply:
        from rollmill.data.renderer.call_formats import describe_tools, parse_tool_calls
        from rollmill.rollout.policy import PolicyConversation

        assert isinstance(task.prompt, str)
        start = f"{describe_tools(tools.descriptions, self.format)}\n\n{task.prompt}" if self.describe else task.prompt
        dialogue, reply = PolicyConversation(policy, start, self.compaction), None
        for turn in range(self.turns):
            try:
                if reply is not None:
                    await dialogue.compact(reply)
                reply = await dialogue.ask()
            except ContextLengthError:
                if reply is None:
                    raise
                break
            found = parse_tool_calls(reply.completion.parsed_reply, self.format, salt=str(turn))
            if self._is_last(turn, reply, found.malformed, tools) or not (found.tool_calls or found.malformed):
                break
            results = [(await tools.answered(call)).text for call in found.tool_calls]
            results += [tools.malformed_message(found.malformed)] if found.malformed else []
            dialogue.tell("".join(self.result.replace("{result}", each) for each in results))
        assert reply is not None
        return reply

    def _is_last(self, turn: int, reply: Reply, malformed: Sequence[str], tools: Toolbox) -> bool:
        """True for the last turn. Calls that cannot be read are no answer, and count in the last turn, too."""
        is_last = turn == self.turns - 1
        if malformed:
            reply.completion.reply = replace(reply.completion.parsed_reply, content="")
            if is_last:
                tools.malformed_message(malformed)
        return is_last
