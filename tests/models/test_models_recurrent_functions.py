"""The gated delta rule in chunks, against the recurrence token by token in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollmill.models.recurrent_functions import chunk_gated_delta_rule

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
KEY_HEADS, HEADS, SIZE = 2, 4, 8


def inputs(length: int, seed: int = 0) -> Inputs:
    """Queries, keys, values, logs of decays and strengths of two sequences. Strong decays (to e^-50, as Qwen3-Next has
    them) are followed by weak ones.
    """
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(2, length, KEY_HEADS, SIZE, generator=generator) for _ in range(2))
    value = torch.randn(2, length, HEADS, SIZE, generator=generator)
    decay = -torch.rand(2, length, HEADS, generator=generator)
    decay *= torch.where(torch.arange(length) % 64 < 40, 50.0, 0.02)[:, None]
    return query, key, value, decay, torch.rand(2, length, HEADS, generator=generator)


def token_by_token(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Inputs:
    """Outputs and last state by the definition: the state decays, and the value that it has for a key moves to the
    token's by `beta`.
    """
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (query, key))
    outputs = []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        known = torch.einsum("nhk,nhkv->nhv", key[:, t], state)
        moved = beta[:, t, :, None] * (value[:, t] - known)
        state = state + torch.einsum("nhk,nhv->nhkv", key[:, t], moved)
        outputs.append(torch.einsum("nhk,nhkv->nhv", query[:, t], state) / SIZE**0.5)
    return torch.stack(outputs, 1), state  # type: ignore[return-value]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("length", [1, 20, 64, 150])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_output_and_state_are_those_of_the_definition(length: int, chunk_size: int) -> None:
    """transformers' own function is off by 4e-5: its decays between neighbours are differences of large sums."""
    given = inputs(length)
    state = torch.randn(2, HEADS, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    for before in (None, state):
        start = torch.zeros_like(state) if before is None else before
        expected, last = token_by_token(*(x.double() for x in (*given, start)))  # type: ignore[misc]
        found, after = chunk_gated_delta_rule(
            *given, chunk_size=chunk_size, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert found.dtype == torch.float32
        assert after is not None
        assert off(found, expected) < 2e-6
        assert off(after, last) < 2e-6


def test_gradients_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    given = [x.double().requires_grad_() for x in (*inputs(70), torch.randn(2, HEADS, SIZE, SIZE, generator=generator))]
    weights = torch.randn(2, 70, HEADS, SIZE, generator=generator)
    expected, last = token_by_token(*given)  # type: ignore[misc]
    found, after = chunk_gated_delta_rule(
        *given[:5], initial_state=given[5], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert after is not None
    gradients = [
        torch.autograd.grad((output * weights).sum() + state.square().sum(), given)
        for output, state in ((found, after), (expected, last))
    ]
    for own, theirs in zip(*gradients, strict=True):
        assert off(own, theirs) < 1e-10


def test_the_type_of_the_queries_is_kept_and_the_state_left_out_unless_asked_for() -> None:
    query, key, value, g, beta = inputs(10)
    output, state = chunk_gated_delta_rule(query.bfloat16(), key.bfloat16(), value.bfloat16(), g, beta.bfloat16())
    assert output.dtype == torch.bfloat16
    assert state is None
