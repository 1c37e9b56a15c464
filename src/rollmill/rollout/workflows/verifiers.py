"""Workflow `verifiers`: rollouts by an environment of the library verifiers, which calls the policy's endpoint."""

from __future__ import annotations

from typing import Protocol

from rollmill.config.workflows import VerifiersWorkflow
from rollmill.data.verifiers import TASK_INDEX
from rollmill.errors import EpisodeError, TasksetError
from rollmill.rollout.policy import Policy
from rollmill.rollout.resources import WorkflowResources
from rollmill.rollout.verifiers_process import VerifiersProcessPool
from rollmill.types import Task


class EndpointProtocol(Protocol):
    """An OpenAI-compatible server that is this rollout's policy, and records."""

    @property
    def base_url(self) -> str:
        """URL that ends with /v1."""
        ...

    @property
    def api_key(self) -> str:
        """Key of this rollout."""
        ...


class VerifiersRunner:
    """Runs rollouts in a process that the workflows of equal sections share."""

    def __init__(self, config: VerifiersWorkflow, resources: WorkflowResources) -> None:
        self._pool = resources.kept(config, lambda: VerifiersProcessPool(config))

    async def __call__(self, task: Task, policy: Policy, endpoint: EndpointProtocol) -> dict[str, float | None]:
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
            found = await self._pool.run(message)
        except EpisodeError as error:
            raise EpisodeError(f"verifiers failed on task {task.id}: {error}") from error
        policy.log(**found["metrics"])
        return {str(name): float(value) for name, value in found["rewards"].items()}
