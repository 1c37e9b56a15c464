"""Workflow `tools`: the policy calls tools until it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollmill.config.workflows import ToolWorkflow, ToolWorkflowSection
from rollmill.data.renderer.call_formats import describe_tools, parse_tool_calls
from rollmill.errors import ContextLengthError
from rollmill.rewards import RewardResult
from rollmill.rollout.policy import Policy, PolicyConversation, Reply
from rollmill.rollout.tools.toolbox import Toolbox
from rollmill.rollout.workflow import RolloutScorer, WorkflowResult
from rollmill.types import Task

MALFORMED_CALL_PENALTY = "malformed_calls"
"""The reward part with the cost of failed calls."""


async def tool_turns(
    config: ToolWorkflow, task: Task, policy: Policy, judge: RolloutScorer, tools: Toolbox
) -> WorkflowResult:
    """Return the rewards of the last turn, less the penalty."""
    reply = await (_in_text if isinstance(task.prompt, str) else _in_chat)(config, task, policy, tools)
    return apply_malformed_penalty(config, await judge(reply), tools)


def apply_malformed_penalty(config: ToolWorkflowSection, judgement: RewardResult, tools: Toolbox) -> WorkflowResult:
    """Subtract the penalty of failed calls from the rewards."""
    if not config.malformed_penalty:
        return judgement
    return judgement, {MALFORMED_CALL_PENALTY: -config.malformed_penalty * tools.errors}


def _is_last(turn: int, config: ToolWorkflow, reply: Reply, malformed: Sequence[str], tools: Toolbox) -> bool:
    """True for the last turn. Calls that cannot be read are no answer, and count in the last turn, too."""
    is_last = turn == config.turns - 1
    if malformed:
        reply.completion.reply = replace(reply.completion.parsed_reply, content="")
        if is_last:
            tools.malformed_message(malformed)
    return is_last


async def _in_chat(config: ToolWorkflow, task: Task, policy: Policy, tools: Toolbox) -> Reply:
    dialogue, reply = PolicyConversation.of_task(policy, task), None
    described = tools.descriptions if config.describe else None
    for turn in range(config.turns):
        try:
            reply = await dialogue.ask(tools=described, tool_format=config.format)
        except ContextLengthError:
            if reply is None:
                raise
            break
        if _is_last(turn, config, reply, reply.malformed, tools) or not (reply.tool_calls or reply.malformed):
            break
        dialogue.messages += await tools.answer(reply)
    assert reply is not None
    return reply


async def _in_text(config: ToolWorkflow, task: Task, policy: Policy, tools: Toolbox) -> Reply:
    assert isinstance(task.prompt, str)
    start = f"{describe_tools(tools.descriptions, config.format)}\n\n{task.prompt}" if config.describe else task.prompt
    dialogue, reply = PolicyConversation(policy, start), None
    for turn in range(config.turns):
        try:
            reply = await dialogue.ask()
        except ContextLengthError:
            if reply is None:
                raise
            break
        found = parse_tool_calls(reply.completion.parsed_reply, config.format, salt=str(turn))
        if _is_last(turn, config, reply, found.malformed, tools) or not (found.tool_calls or found.malformed):
            break
        results = [(await tools.answered(call)).text for call in found.tool_calls]
        results += [tools.malformed_message(found.malformed)] if found.malformed else []
        dialogue.tell("".join(config.result.replace("{result}", each) for each in results))
    assert reply is not None
    return reply
