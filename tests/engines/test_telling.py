"""What a request is told of its tokens while they are sampled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.endpoints import toy_engine

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest, SampledToken


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 5}, {"temperature": 0.0}])
def test_tokens_are_told_as_they_are_completed(options: dict[str, float]) -> None:
    engine, tokenizer = toy_engine()
    told: list[SampledToken] = []
    sampling = SamplingConfig(max_new_tokens=12, **options)
    prompt = tokenizer.encode("how many apples")
    request = GenerationRequest(prompt, sampling, n=3, seed=4, on_token=told.append, top=7)
    silent = GenerationRequest(prompt, sampling, n=3, seed=4)

    async def both() -> list[list[object]]:
        return [await engine.generate(each) for each in (request, silent)]  # type: ignore[misc]

    loud, plain = asyncio.run(both())
    for one, other in zip(loud, plain, strict=True):
        own = [each for each in told if each.index == one.index]
        assert [each.token for each in own] == one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose([each.logprob for each in own], one.logprobs + one.kept_logmass, atol=1e-6)
        for each in own:
            ids, logprobs = zip(*each.top, strict=True)
            assert len(set(ids)) == 7
            assert list(logprobs) == sorted(logprobs, reverse=True)
            assert np.exp(logprobs).sum() <= 1 + 1e-5
            if each.token in ids:
                assert logprobs[ids.index(each.token)] == pytest.approx(each.logprob, abs=1e-4)
            if options.get("temperature") == 0:
                assert ids[0] == each.token
