"""Workflows with tool calls."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from rollmill.config.workflows.base import WorkflowSection


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


class ToolWorkflow(ToolWorkflowSection):
    """The policy calls tools until a turn has no call: that turn is the answer, scored by `rewards`."""

    implementation = "rollmill.rollout.workflows.tools:tool_turns"
    name: Literal["tools"] = "tools"
    format: Literal["auto", "hermes", "json"] = "auto"
    """Syntax of calls: within `<tool_call>` tags, as JSON, or `auto`: tags if there are any, else JSON."""
    result: str = "\n<tool_response>\n{result}\n</tool_response>\n"
    """Template of a tool result in plain prompts (no chat), with the placeholder {result}."""

    @field_validator("result")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if "{result}" not in value:
            raise ValueError("the place {result} is missing")
        return value


class ReActWorkflow(ToolWorkflowSection):
    """Thought, Action, Action Input and Observation in one text (arXiv:2210.03629); the text after `Final Answer:` is
    scored by `rewards`."""

    implementation = "rollmill.rollout.workflows.react:react"
    name: Literal["react"] = "react"
