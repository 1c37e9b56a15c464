"""Mixtures of experts in vLLM's process: their weights arrive, and are those of each version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import toy_checkpoint
from support.vllm_service import PYTHON, RunningEngine, needs_vllm

from rollmill.config.model import ModelConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.engines.base import GenerationRequest
from rollmill.errors import ModelError
from rollmill.models.load import PolicyModel, load_policy
from rollmill.orchestrator.engine import build_engine

KINDS = {
    "qwen3_moe": {"moe_intermediate_size": 64, "head_dim": 32},
    "mixtral": {"intermediate_size": 64, "head_dim": 32},
}


def policy_of(folder: Path, kind: str, shape: dict[str, Any]) -> PolicyModel:
    config = ModelConfig(path=toy_checkpoint(folder / "model", kind, **shape))
    return load_policy(config, texts=(), seed=0, device=torch.device("cpu"))


@pytest.mark.service
@pytest.mark.timeout(900)
@needs_vllm
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.thorough)])
def test_log_probs_are_the_trainers_after_every_update(kind: str, tmp_path: Path) -> None:
    running = RunningEngine(policy_of(tmp_path, kind, KINDS[kind]), {"prefill_tokens": 64, "max_sequences": 16})
    model = running.policy.model

    async def publish() -> None:
        running.publish(noise=0.02)

    try:
        for _ in range(3):
            running.run(publish())
            request = GenerationRequest([5, 6, 7, 8], SamplingConfig(max_new_tokens=16), n=8, seed=running.version)
            for each in running.run(running.engine.generate(request)):
                assert set(each.versions.tolist()) == {running.version}
                ids = torch.tensor(np.concatenate([each.prompt_ids, each.token_ids]), dtype=torch.long)[None]
                with torch.no_grad():
                    logprobs = torch.log_softmax(model(ids).logits[0, 3:-1].float(), -1)
                expected = logprobs.gather(1, ids[0, 4:, None])[:, 0].numpy()
                np.testing.assert_allclose(each.logprobs, expected, atol=1e-4)
    finally:
        running.close()


def test_sizes_that_its_cpu_kernel_does_not_take_are_refused(tmp_path: Path) -> None:
    section = {"name": "vllm", "python": PYTHON}
    with pytest.raises(ModelError, match="in blocks of 32"):
        build_engine(policy_of(tmp_path, "qwen3_moe", {}), StageConfig.model_validate({"engine": section}), "fp32")
