"""Environments of agentic workflows."""

from rollmill.rollout.environments.base import Environment, Observation, StepResult

__all__ = ["Environment", "Observation", "StepResult"]
