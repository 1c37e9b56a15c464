"""Rollouts by an environment of the library verifiers, which asks the policy through the endpoint."""

from __future__ import annotations

from typing import Protocol

from rollmill.core.errors import EpisodeError, TasksetError
from rollmill.core.types import Task
from rollmill.explorer.policy import Policy
from rollmill.explorer.verifiers import VerifiersPool
from rollmill.tasks.verifiers import INDEX


class Endpoint(Protocol):
    """An OpenAI-compatible server that is this rollout's policy, and records."""

    @property
    def base_url(self) -> str:
        """Ends with /v1."""
        ...

    @property
    def api_key(self) -> str:
        """Of this rollout alone."""
        ...


async def verifiers_rollout(
    pool: VerifiersPool, task: Task, policy: Policy, endpoint: Endpoint
) -> dict[str, float | None]:
    """The environment's rewards by name, weighted; its metrics are logged.

    Raises:
        TasksetError: the task is none of the taskset's.
        EpisodeError: the rollout failed.
    """
    if INDEX not in task.metadata:
        raise TasksetError(
            f"task {task.id} is no task of verifiers; give taskset.function: rollmill.tasks.verifiers:rows"
        )
    message = {
        "task": task.metadata[INDEX],
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "model": "policy",
    }
    try:
        found = await pool.run(message)
    except EpisodeError as error:
        raise EpisodeError(f"verifiers failed on task {task.id}: {error}") from error
    policy.log(**found["metrics"])
    return {str(name): float(value) for name, value in found["rewards"].items()}
