"""Reward of a command that is run in the rollout's container after its agent has ended."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.config.rewards import Reward
from rollmill.config.section import Section
from rollmill.errors import RewardError
from rollmill.rewards.base import TIMEOUT, Score
from rollmill.types import SEALED, Task

if TYPE_CHECKING:
    from rollmill.rollout.containers import Container
    from rollmill.rollout.containers.container import ExecResult

NO_RESULT = "no_result"
"""Outcome of a command that has left no number where there should be one."""
_LARGEST_RESULT = 1 << 20


class GradingSection(Section):
    """A command that grades what an agent has left in its container."""

    command: str | None = None
    """Shell command that grades. Default: that of the task, as task folders of Harbor have one."""
    files: dict[str, Path] = {}
    """Files and folders of this machine that the command needs, by their path in the container. They are copied there
    after the agent has ended, in place of what it may have put there."""
    result: str = Field("exit_code", pattern="^(exit_code|last_line|/.+)$")
    """Source of the reward. `exit_code`: 1 if it is 0, else 0. `last_line`: the number in the last line of stdout. Or
    the path of a file with a number, or with a JSON object of numbers; of several with ` or ` between them, the first
    that is there."""
    folder: str | None = Field(None, pattern="^/")
    """Working folder of the command. Default: that of the environment."""
    user: str | None = "0"
    """User that the command runs as. Default: root."""
    variables: dict[str, str] = {}
    """Environment variables of the command, in addition to those of the environment."""
    time_limit_s: float = Field(120.0, gt=0)
    """Timeout of the command; the reward is then `timeout_reward`."""
    end_processes: bool = True
    """End all that the agent has left running before the files are copied, so that it cannot change them. Set to false
    where a program that the agent has started is what is graded."""


class ContainerReward(GradingSection, Reward):
    """Runs a command in the rollout's container after the agent has ended; its result is the reward."""

    uses_container = True
    timeout_is_verdict = True
    decides = True

    name: Literal["container"]

    def applies_to(self, task: Task) -> bool:
        """Returns False for a task without a command, where the reward has none either."""
        return self.command is not None or "grading" in task.metadata.get(SEALED, {})

    async def score_container(self, task: Task, container: Container) -> Score:
        """Runs the command. Raises RewardError if its files cannot be copied."""
        if not self.applies_to(task):
            return Score(None)
        grading: GradingSection = self
        if self.command is None:
            grading = GradingSection.model_validate(task.metadata[SEALED]["grading"])
        ended = await run_grading(grading, container)
        if ended.code is None:
            return Score(self.timeout_reward, TIMEOUT)
        return await _result_of(grading.result, ended, container)


async def run_grading(grading: GradingSection, container: Container) -> ExecResult:
    """Copy the files into the container, and run the command there."""
    if grading.end_processes:
        await container.end_processes()
    results = [] if not grading.result.startswith("/") else grading.result.split(" or ")
    stale = [*grading.files, *results]
    above = sorted({str(Path(each).parent) for each in stale} - {"/"})
    made = f"rm -rf -- {shlex.join(stale)}; " if stale else ""
    made += f"mkdir -p -- {shlex.join(above)}" if above else "true"
    cleared = await container.exec(made, user="0", folder="/")
    if not cleared.ok:
        raise RewardError(f"files cannot be put into the container: {cleared.output.strip() or cleared.reason}")
    if grading.files:
        await container.upload(grading.files)
    return await container.exec(
        grading.command or "",
        user=grading.user,
        folder=grading.folder,
        variables=grading.variables,
        time_limit_s=grading.time_limit_s,
    )


async def _result_of(result: str, ended: ExecResult, container: Container) -> Score:
    if result == "exit_code":
        return Score(float(ended.code == 0))
    if result == "last_line":
        lines = ended.stdout.strip().splitlines()
        return score_of(lines[-1] if lines else "")
    for path in result.split(" or "):
        content = await container.read(path, _LARGEST_RESULT)
        if content is not None and content.strip():
            return score_of(content.decode("utf-8", "replace"))
    return Score(0.0, NO_RESULT)


def score_of(text: str) -> Score:
    """The score that a text gives: a number, or a JSON object of numbers, of which `reward` counts if it is there, and
    else their mean."""
    found: Any
    try:
        found = float(text)
    except ValueError:
        try:
            found = json.loads(text)
        except ValueError:
            return Score(0.0, NO_RESULT)
    values = found if isinstance(found, Mapping) else {"reward": found}
    numbers = {str(key): float(value) for key, value in values.items() if isinstance(value, int | float)}
    if len(numbers) < len(values) or not numbers or not all(map(math.isfinite, numbers.values())):
        return Score(0.0, NO_RESULT)
    reward = numbers.pop("reward") if "reward" in numbers else sum(numbers.values()) / len(numbers)
    return Score(reward, details=numbers)
