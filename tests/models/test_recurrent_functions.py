"""The gated delta rule in chunks, against the recurrence token by token in float64; Mamba 2's step with its limit."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.models.mamba2 import modeling_mamba2

from rollmill.models.recurrent_functions import chunk_gated_delta_rule, step_limit, use_exact_functions

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


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, norm: bool = True
) -> Inputs:
    """Outputs and last state by the definition: the state decays, and the value that it has for a key moves to the
    token's by `beta`.
    """
    if norm:
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


def test_queries_and_keys_are_taken_as_they_are_unless_norms_are_asked_for() -> None:
    query, key, value, g, beta = inputs(10)
    key = 0.5 * key / key.norm(dim=-1, keepdim=True)
    state = torch.zeros(2, HEADS, SIZE, SIZE)
    expected, _ = token_by_token(*(x.double() for x in (query, key, value, g, beta, state)), norm=False)  # type: ignore[misc]
    found, _ = chunk_gated_delta_rule(query, key, value, g, beta)
    assert off(found, expected) < 2e-6


def test_the_type_of_the_queries_is_kept_and_the_state_left_out_unless_asked_for() -> None:
    query, key, value, g, beta = inputs(10)
    state = torch.ones(2, HEADS, SIZE, SIZE, dtype=torch.bfloat16)
    output, after = chunk_gated_delta_rule(
        query.bfloat16(), key.bfloat16(), value.bfloat16(), g, beta.bfloat16(), initial_state=state
    )
    assert output.dtype == torch.bfloat16
    assert output.is_contiguous()
    assert after is None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A module that has both functions."""
    module: Any = ModuleType(request.node.name)
    module.torch_chunk_gated_delta_rule = module.mamba2_selective_state_update = lambda *args, **kwargs: (args, kwargs)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def layer_of(module: Any) -> Any:
    return type("Layer", (nn.Module,), {"__module__": module.__name__})()


@pytest.mark.parametrize("fla", [False, True])
def test_functions_of_a_module_are_replaced(fla: bool, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fla` has its own kernels for the delta rule, which transformers then uses."""
    found = {"fla": object()} if fla else {}
    monkeypatch.setattr("rollmill.models.recurrent_functions.find_spec", found.get)
    step = module.mamba2_selective_state_update
    use_exact_functions(module.__name__)
    assert (module.torch_chunk_gated_delta_rule is chunk_gated_delta_rule) == (not fla)
    assert module.mamba2_selective_state_update is not step


def test_a_module_without_these_functions_is_left_alone(module: Any) -> None:
    del module.torch_chunk_gated_delta_rule, module.mamba2_selective_state_update
    names = set(vars(module))
    use_exact_functions(module.__name__)
    assert set(vars(module)) == names
    layer = layer_of(module)
    layer.time_step_limit = (0.1, 1.0)
    assert step_limit(layer) == {}


def test_a_limit_is_handed_to_the_step_if_it_limits_anything(module: Any) -> None:
    one = layer_of(module)
    assert step_limit(one) == {}
    for limit, expected in ((None, {}), ((0.0, math.inf), {}), ([1e-3, math.inf], {"dt_limit": (1e-3, math.inf)})):
        one.time_step_limit = limit
        assert step_limit(one) == expected
    one.time_step_limit = (0.0, 2.0)
    assert step_limit(one) == {"dt_limit": (0.0, 2.0)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positive", [True, False])
def test_the_size_of_a_step_is_limited(bias: bool, positive: bool) -> None:
    use_exact_functions(modeling_mamba2.__name__)
    step = modeling_mamba2.mamba2_selective_state_update
    generator = torch.Generator().manual_seed(3)
    state, hidden = torch.randn(2, 4, 3, 5, generator=generator), torch.randn(2, 4, 3, generator=generator)
    dt, shift = torch.randn(2, 4, 3, generator=generator), torch.randn(4, 3, generator=generator)
    decay, skip = -torch.rand(4, 3, 5, generator=generator), torch.randn(4, 3, generator=generator)
    written, read = torch.randn(2, 1, 5, generator=generator), torch.randn(2, 1, 5, generator=generator)
    options = {"dt_bias": shift if bias else None, "dt_softplus": positive}
    others = (decay, written, read, skip)
    size = dt + shift if bias else dt
    size = softplus(size) if positive else size
    for given, taken in ((options, size), (options | {"dt_limit": (0.5, 1.0)}, size.clamp(0.5, 1.0))):
        own, expected = state.clone(), state.clone()
        output = step(own, hidden, dt, *others, **given)
        torch.testing.assert_close(output, step(expected, hidden, taken, *others))
        torch.testing.assert_close(own, expected)
        assert not torch.equal(own, state)
