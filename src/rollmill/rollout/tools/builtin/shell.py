"""Tool that runs the policy's commands in the rollout's container."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.tools import ToolSection
from rollmill.rollout.tools.toolbox import ToolError

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from rollmill.rollout.containers import Container
    from rollmill.rollout.tools.function_tool import FunctionTool
    from rollmill.rollout.tools.pool import ToolPool
    from rollmill.rollout.tools.toolbox import Tool
    from rollmill.rollout.workflow import Rollout


class ShellTool(ToolSection):
    """Shell commands in the rollout's container."""

    uses_container: ClassVar[bool] = True
    name: Literal["shell"] = "shell"
    shell: str = "/bin/sh"
    """Program of the container that runs the commands, by `-c`."""
    time_limit_s: float = Field(30.0, gt=0)
    """Timeout of one command, reported to the policy; it is killed with all that it has started."""
    _function: FunctionTool = PrivateAttr()

    def setup(self, pool: ToolPool) -> None:
        from rollmill.rollout.tools.function_tool import FunctionTool

        self._function = FunctionTool(shell)

    def open(self, rollout: Rollout, stack: AsyncExitStack) -> Tool:
        container = container_of(rollout)

        async def call(arguments: dict[str, Any]) -> str:
            command: str = self._function.checked(arguments)["command"]
            words = [self.shell, "-c", command]
            ended = await container.exec(words, time_limit_s=self.time_limit_s, most_output=4 * self.result_chars)
            if ended.ok:
                return ended.output
            last = ended.reason or f"exit code {ended.code}"
            raise ToolError("\n".join(each for each in (ended.output.rstrip("\n"), last) if each))

        return self._function.tool(self.policy_name, self.description, call)


def shell(command: str) -> str:
    """Run a shell command. Its output comes back, and its exit code where that is not 0.

    Each command has a shell of its own; files stay, and so do programs in the background.

    Args:
        command: what the shell runs.
    """
    raise NotImplementedError  # the policy sees signature and docstring; ShellTool runs the command


def container_of(rollout: Rollout) -> Container:
    """The container that a rollout's tools work in."""
    assert rollout.container is not None, "checks refuse such tools without an environment `container`"
    return rollout.container
