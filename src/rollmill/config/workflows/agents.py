"""Workflows with tools."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from rollmill.config.workflows.base import WorkflowSection


class ToolWorkflowSection(WorkflowSection):
    """Keys of workflows that call tools."""

    uses_tools: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    turns: int = Field(8, ge=1)
    """Most turns of the policy. After the last one calls are no longer answered."""
    describe: bool = True
    """Tell the policy which tools there are. False where it knows them from training."""
    malformed_penalty: float = Field(0.0, ge=0)
    """What a rollout loses for each call that cannot be read, has wrong arguments or fails; the part
    `malformed_calls`."""


class ToolWorkflow(ToolWorkflowSection):
    """The policy calls tools until a turn makes no call: that turn is the answer, judged by `rewards`."""

    name: Literal["tools"] = "tools"
    format: Literal["auto", "hermes", "json"] = "auto"
    """How calls are written: within `<tool_call>` tags, as JSON, or `auto`: tags where there are some, else JSON."""
    result: str = "\n<tool_response>\n{result}\n</tool_response>\n"
    """What a policy with plain prompts (no chat) sees of a result, at the place {result}."""

    @field_validator("result")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if "{result}" not in value:
            raise ValueError("the place {result} is missing")
        return value


class ReActWorkflow(ToolWorkflowSection):
    """Thought, Action, Action Input and Observation in one text (arXiv:2210.03629); what follows `Final Answer:` is
    judged by `rewards`."""

    name: Literal["react"] = "react"
