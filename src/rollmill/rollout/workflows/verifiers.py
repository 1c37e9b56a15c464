"""Workflow `verifiers`: rollouts by an environment of the library verifiers, which calls the policy's endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.workflows import WorkflowSection
from rollmill.data.verifiers import TASK_INDEX
from rollmill.errors import EpisodeError, TasksetError
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.rollout.policy import Policy
    from rollmill.rollout.resources import WorkflowResources
    from rollmill.rollout.verifiers_process import VerifiersProcessPool
    from rollmill.rollout.workflow import EndpointAccess


class VerifiersWorkflow(WorkflowSection):
    """An environment of the library verifiers (0.4), unmodified: its tasks, tools and rewards, with the policy behind
    rollmill's endpoint.

    It runs in a separate Python, created by `make verifiers-setup`; tasks come from `rollmill.data.verifiers:rows`.
    """

    uses_rewards: ClassVar[bool] = False
    multi_step: ClassVar[bool] = True

    name: Literal["verifiers"] = "verifiers"
    taskset: str
    """Id of an installed package of tasks, or FILE.py with one."""
    python: Path = Path(".venv-verifiers/bin/python")
    """Python interpreter that has verifiers."""
    options: dict[str, Any] = {}
    """Keys of the taskset's own configuration."""
    env: dict[str, Any] = {}
    """Keys of verifiers' section `env`: `id` of an environment, `agent`, `timeout` ..."""
    harness: str = "rollmill_chat"
    """Harness that talks to the policy: a conversation with tools, or the id of one of verifiers' programs, such as
    `bash`."""
    turns: int | None = Field(None, ge=1)
    """Maximum turns of the policy; null: the environment's limit."""
    at_once: int = Field(32, ge=1)
    """Maximum number of concurrent rollouts."""
    time_limit_s: float = Field(300.0, gt=0)
    """Timeout of a rollout."""
    restart_after: int = Field(500, ge=1)
    """Rollouts after which the process is replaced, to limit memory leaks."""
    _processes: VerifiersProcessPool = PrivateAttr()

    def setup(self, resources: WorkflowResources) -> None:
        """Make the process, which workflows of equal sections share."""
        from rollmill.rollout.verifiers_process import VerifiersProcessPool

        options = self.model_copy()  # without the process, so that equal sections stay equal
        self._processes = resources.kept(options, lambda: VerifiersProcessPool(options))

    async def solve(self, task: Task, policy: Policy, endpoint: EndpointAccess) -> dict[str, float | None]:
        """Return the environment's rewards by name, weighted; its metrics are logged.

        Raises:
            TasksetError: the task is not from verifiers.
            EpisodeError: the rollout failed.
        """
        if TASK_INDEX not in task.metadata:
            raise TasksetError(
                f"task {task.id} is no task of verifiers; give taskset.function: rollmill.data.verifiers:rows"
            )
        message = {
            "task": task.metadata[TASK_INDEX],
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": "policy",
        }
        try:
            found = await self._processes.run(message)
        except EpisodeError as error:
            raise EpisodeError(f"verifiers failed on task {task.id}: {error}") from error
        policy.log(**found["metrics"])
        return {str(name): float(value) for name, value in found["rewards"].items()}
