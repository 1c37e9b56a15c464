"""Workflow `react`: Thought, Action, Action Input and Observation in one text (ReAct, arXiv:2210.03629)."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollmill.errors import ContextLengthError
from rollmill.files import parse_strict_json
from rollmill.rollout.workflows.tools import ToolWorkflowSection
from rollmill.types import StopReason, Task

if TYPE_CHECKING:
    from rollmill.rollout.policy import Policy, Reply
    from rollmill.rollout.tools.toolbox import Toolbox
    from rollmill.rollout.workflow import RolloutScorer, WorkflowResult

STOP_MARKER, FINAL_ANSWER_MARKER = "Observation:", "Final Answer:"
_ACTION = re.compile(r"Action:([^\n]*)\n[ \t]*Action Input:(.*)", re.DOTALL)
_GUIDE = """\
Answer the question. You have these tools:

{tools}

Use this format:

Thought: what to do
Action: one of {names}
Action Input: the tool's arguments as a JSON object
Observation: the result
... (as often as needed)
Thought: I know the answer
Final Answer: the answer"""


class ReActWorkflow(ToolWorkflowSection):
    """Thought, Action, Action Input and Observation in one text (arXiv:2210.03629); the text after `Final Answer:` is
    scored by `rewards`."""

    name: Literal["react"] = "react"

    async def solve(self, task: Task, policy: Policy, judge: RolloutScorer, tools: Toolbox) -> WorkflowResult:
        """Return the rewards of the final answer (of the last turn, if there is none), less the penalty."""
        token_ids = self._start(task, policy, tools)
        stop, reply = [*policy.sampling.stop, STOP_MARKER], None
        for turn in range(self.turns):
            try:
                reply = await policy.complete(token_ids, stop=stop)
            except ContextLengthError:
                if reply is None:
                    raise
                break
            if turn == self.turns - 1 or not _observes(reply, policy):
                break
            action = parse_action(reply.completion.answer, tools)
            if action.wrong:
                observed = tools.malformed_message([action.wrong])
            else:
                observed = (await tools.call(action.name, action.arguments)).text
            token_ids = [*reply.token_ids, *policy.encode(f" {observed}\n")]
        assert reply is not None
        _, found, answer = reply.completion.answer.rpartition(FINAL_ANSWER_MARKER)
        return self.less_penalty(await judge(answer.strip() if found else reply), tools)

    def _start(self, task: Task, policy: Policy, tools: Toolbox) -> list[int]:
        from rollmill.data.content_parts import join_contents

        listed = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in tools.descriptions)
        guide = _GUIDE.replace("{tools}", listed).replace("{names}", ", ".join(tools.names)) if self.describe else ""
        if isinstance(task.prompt, str):
            return policy.encode(f"{guide}\n\n{task.prompt}" if guide else task.prompt, start=True)
        messages: list[dict[str, Any]] = [dict(each) for each in task.prompt]
        if guide and messages[0]["role"] == "system":
            messages[0]["content"] = join_contents(messages[0]["content"], guide, "\n\n")
        elif guide:
            messages[0]["content"] = join_contents(guide, messages[0]["content"], "\n\n")
        return policy.prompt(messages)


@dataclass(frozen=True, slots=True)
class ReactAction:
    """An action of the policy. `wrong` describes its error, if any."""

    name: str
    arguments: dict[str, Any]
    wrong: str = ""


def parse_action(text: str, tools: Toolbox) -> ReactAction:
    """Parse the last action of a turn. An input that is no object becomes the only argument of a one-argument tool."""
    found = _ACTION.match(text, max(text.rfind("Action:"), 0))
    if found is None:
        return ReactAction("", {}, "a turn ends with `Action:` and `Action Input:`, or with `Final Answer:`")
    name, given = found[1].strip(), found[2].strip()
    arguments: Any = given
    with suppress(ValueError):
        arguments = parse_strict_json(given)
    if isinstance(arguments, dict):
        return ReactAction(name, arguments)
    schema = tools.schema(name)
    keys = list(schema.get("properties", {}))
    if len(keys) == 1:
        only = schema["properties"][keys[0]].get("type")
        return ReactAction(name, {keys[0]: given if only == "string" else arguments})
    return ReactAction(name, {}, "" if not keys and schema else f"the input of `{name}` is no JSON object")


def _observes(reply: Reply, policy: Policy) -> bool:
    """True if the turn was ended by the marker of the coming observation, and by nothing before it."""
    return reply.stop_reason is StopReason.STOP and STOP_MARKER in policy.decode(reply.completion.token_ids.tolist())
