"""The policy calls tools until it answers."""

from __future__ import annotations

from rollmill.config.workflows import ToolTurns
from rollmill.config.workflows.agents import AgentSection
from rollmill.core.errors import ContextError
from rollmill.core.types import Task
from rollmill.explorer.dialogue import Dialogue
from rollmill.explorer.policy import Policy, Reply
from rollmill.explorer.tools.formats import describe, read
from rollmill.explorer.tools.toolbox import Toolbox
from rollmill.explorer.workflow import Answer, RolloutJudge
from rollmill.rewards import Judgement

PENALTY = "malformed_calls"
"""The part of a reward that failed calls cost."""


async def tool_turns(config: ToolTurns, task: Task, policy: Policy, judge: RolloutJudge, tools: Toolbox) -> Answer:
    """What the rewards say of the last turn, less the penalty."""
    reply = await (_in_text if isinstance(task.prompt, str) else _in_chat)(config, task, policy, tools)
    return penalised(config, await judge(reply), tools)


def penalised(config: AgentSection, judgement: Judgement, tools: Toolbox) -> Answer:
    """A judgement less what failed calls cost."""
    if not config.malformed_penalty:
        return judgement
    return judgement, {PENALTY: -config.malformed_penalty * tools.errors}


async def _in_chat(config: ToolTurns, task: Task, policy: Policy, tools: Toolbox) -> Reply:
    dialogue, reply = Dialogue.of_task(policy, task), None
    described = tools.descriptions if config.describe else None
    for turn in range(config.turns):
        try:
            reply = await dialogue.ask(tools=described, tool_format=config.format)
        except ContextError:
            if reply is None:
                raise
            break
        if turn == config.turns - 1 or not (reply.tool_calls or reply.malformed):
            break
        dialogue.messages += await tools.answer(reply)
    assert reply is not None
    return reply


async def _in_text(config: ToolTurns, task: Task, policy: Policy, tools: Toolbox) -> Reply:
    assert isinstance(task.prompt, str)
    start = f"{describe(tools.descriptions, config.format)}\n\n{task.prompt}" if config.describe else task.prompt
    dialogue, reply = Dialogue(policy, start), None
    for turn in range(config.turns):
        try:
            reply = await dialogue.ask()
        except ContextError:
            if reply is None:
                raise
            break
        reading = read(reply.text, config.format, salt=str(turn))
        if turn == config.turns - 1 or not (reading.calls or reading.malformed):
            break
        results = [(await tools.answered(call)).content for call in reading.calls]
        results += [tools.complaint(reading.malformed)] if reading.malformed else []
        dialogue.tell("".join(config.result.replace("{result}", each) for each in results))
    assert reply is not None
    return reply
