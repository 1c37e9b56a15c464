"""The native rollout engine."""

from rollmill.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
