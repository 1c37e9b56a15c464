"""vLLM in tests: whether it is there, in an environment of its own, and an engine with a policy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmill.config.run import StageConfig
from rollmill.engines.vllm.engine import VLLMEngine
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.engine import build_engine, build_publisher
from rollmill.weights import WeightPublisher

PYTHON = Path(os.environ.get("ROLLMILL_VLLM_PYTHON", Path(__file__).parents[2] / ".venv-vllm/bin/python"))

needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}; `make vllm-setup` installs it")


class RunningEngine:
    """An engine with its policy, and an event loop that outlasts a test."""

    def __init__(self, policy: PolicyModel, rollout: dict[str, Any], **options: Any) -> None:
        self.policy = policy
        section = {"name": "vllm", "python": PYTHON, "cache_gb": 0.25, **options}
        self.config = StageConfig.model_validate({"engine": section, "rollout": rollout})
        self.loop = asyncio.new_event_loop()
        engine = build_engine(policy, self.config, "fp32")
        assert isinstance(engine, VLLMEngine)
        self.engine = engine
        self.publisher: WeightPublisher = build_publisher(policy, engine, "fp32")
        self.version, self.noise = 0, torch.Generator().manual_seed(0)
        self.publish()

    def publish(self, noise: float = 0.0) -> None:
        """Move all weights, and publish them as the next version."""
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self.noise) * noise)
        self.version += 1
        self.publisher.publish(self.version)

    def run(self, work: Awaitable[Any]) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(800):
                return await work

        return self.loop.run_until_complete(within())

    def close(self) -> None:
        self.run(self.engine.close())
        self.publisher.close()
        self.loop.close()
