"""Workflows that run environments of the library verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class VerifiersWorkflow(WorkflowSection):
    """An environment of the library verifiers (0.4), unmodified: its tasks, tools and rewards, with the policy behind
    rollmill's endpoint.

    It runs in a separate Python, created by `make verifiers-setup`; tasks come from `rollmill.data.verifiers:rows`.
    """

    uses_rewards: ClassVar[bool] = False
    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.verifiers:VerifiersRunner"
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
