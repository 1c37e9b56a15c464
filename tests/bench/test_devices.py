"""What the GPU check's benchmarks rely on: the engine and a training step give on CUDA what they give on the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import models
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [200, 3, 77]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLMILL_BENCH_CACHE", str(tmp_path_factory.mktemp("models")))
        yield models.model_dir("tiny")


def load(folder: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def complete(model: Any, dtype: torch.dtype, temperature: float) -> list[list[Any]]:
    engine = NativeEngine(model, context=256, dtype=dtype)
    engine.weights_updated(0)
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=24)

    async def all_of_them() -> list[list[Any]]:
        return await asyncio.gather(
            *(engine.generate(GenerationRequest(ids, sampling, n=3, seed=1)) for ids in PROMPTS)
        )

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_greedy_tokens_equal_transformers(folder: Path, device: str) -> None:
    model = load(folder, device)
    for ids, group in zip(PROMPTS, complete(model, torch.float32, 0.0), strict=True):
        input_ids = torch.tensor([ids], device=device)
        mask = torch.ones_like(input_ids)
        expected = model.generate(input_ids=input_ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
        assert all(one.token_ids.tolist() == expected[0, len(ids) :].tolist() for one in group)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_logprobs_equal_a_forward_pass(folder: Path, device: str, dtype: torch.dtype, tolerance: float) -> None:
    model = load(folder, device)
    for ids, group in zip(PROMPTS, complete(model, dtype, 1.0), strict=True):
        for one in group:
            tokens = torch.tensor([[*ids, *one.token_ids.tolist()]], device=device)
            with torch.no_grad():
                logprobs_TV = torch.log_softmax(model(tokens).logits[0].float(), -1)
            picked = logprobs_TV[len(ids) - 1 : -1].gather(1, tokens[0, len(ids) :, None])[:, 0].cpu()
            torch.testing.assert_close(torch.from_numpy(one.logprobs), picked, atol=tolerance, rtol=0)
