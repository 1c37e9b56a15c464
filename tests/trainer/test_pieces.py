"""Chunked log-probs, schedules, cutting into parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.config.trainer import TrainerConfig
from rollmill.trainer.logprobs import token_logprobs
from rollmill.trainer.optimizer import compute_learning_rate
from rollmill.trainer.update import split_mini_batches
from rollmill.types import ExperienceSource


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_logprobs_equal_log_softmax(
    dtype: torch.dtype, chunk: int, softcap: float | None, entropy_gradient: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 6, dtype=dtype), torch.randn(11, 6, dtype=dtype)
    offset = torch.randn(11, dtype=dtype) if bias else None
    rows = torch.tensor([0, 3, 3, 8, 1, 2, 7, 3, 4, 5, 6])
    target = torch.randint(11, (len(rows),))
    temperature = torch.rand(len(rows), dtype=dtype) + 0.5
    leaves = [x.requires_grad_() for x in (hidden, weight, offset) if x is not None]
    got = token_logprobs(
        hidden,
        rows,
        weight,
        offset,
        target,
        temperature,
        chunk=chunk,
        softcap=softcap,
        scale=0.7,
        entropy_gradient=entropy_gradient,
    )
    logits = 0.7 * (hidden[rows] @ weight.T + (0 if offset is None else offset))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    log_p = torch.log_softmax(logits / temperature[:, None], -1)
    expected = log_p[torch.arange(len(rows)), target], -(log_p.exp() * log_p).sum(-1)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert got[1].requires_grad == entropy_gradient
    mix = torch.linspace(-1, 1, len(rows), dtype=dtype)
    losses = [mix @ a + ((mix.flip(0) @ b) if entropy_gradient else 0) for a, b in (got, expected)]
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_log_probs_of_narrow_inputs_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(5000, 8).bfloat16()
    target, temperature = torch.randint(5000, (4,)), torch.ones(4)
    logprob, _ = token_logprobs(hidden, torch.arange(4), weight, None, target, temperature, chunk=2)
    exact = torch.log_softmax((hidden @ weight.T).double(), -1)[torch.arange(4), target]
    assert logprob.dtype == torch.float32
    torch.testing.assert_close(logprob.double(), exact, rtol=1e-6, atol=1e-6)


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, **k: seen.append(len(x)) or real(x, **k))
    hidden, weight = torch.randn(10, 4, requires_grad=True), torch.randn(7, 4)
    logprob, _ = token_logprobs(
        hidden, torch.arange(10), weight, None, torch.zeros(10, dtype=torch.long), torch.ones(10), chunk=3
    )
    logprob.sum().backward()
    assert seen == [3, 3, 3, 1] * 2


def test_schedules() -> None:
    def values(**config: Any) -> list[float]:
        return [compute_learning_rate(TrainerConfig(lr=1.0, **config), step, 6) for step in range(7)]

    assert values() == [1.0] * 7
    assert values(warmup_steps=2) == [0.5] + [1.0] * 6
    assert values(schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert values(schedule="linear", warmup_steps=2, min_lr_ratio=0.2)[-1] == pytest.approx(0.2)
    assert values(schedule="cosine", warmup_steps=2) == pytest.approx(
        [0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0], abs=1e-6
    )
    assert values(schedule="cosine", min_lr_ratio=0.5)[3] == pytest.approx(0.75)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.integers(1, 6), demonstrations=st.integers(0, 5), shuffled=st.booleans())
def test_parts_keep_groups_whole_and_lose_nobody(
    make_batch: Any, parts: int, demonstrations: int, shuffled: bool
) -> None:
    batch = make_batch(groups=4, size=3, demonstrations=demonstrations)
    result = split_mini_batches(batch, parts, torch.Generator().manual_seed(1) if shuffled else None)
    assert sorted(i for part in result for i in part) == list(range(len(batch)))
    home = {batch[i].group: n for n, part in enumerate(result) for i in part}
    assert all(home[batch[i].group] == n for n, part in enumerate(result) for i in part)
    if parts <= 4:
        assert all(any(batch[i].source is ExperienceSource.ROLLOUT for i in part) for part in result)
