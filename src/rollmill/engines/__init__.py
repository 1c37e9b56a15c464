"""Rollout engines: the protocol, the native engine that decodes with the trainer's own parameters, and vLLM."""

from rollmill.engines.base import GenerationRequest, RolloutEngine

__all__ = ["GenerationRequest", "RolloutEngine"]
