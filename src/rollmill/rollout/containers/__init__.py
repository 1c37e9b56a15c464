"""Containers of rollouts: an engine with Docker's API, the containers that it runs, and one for each rollout."""

from rollmill.rollout.containers.container import Container, ExecResult

__all__ = ["Container", "ExecResult"]
