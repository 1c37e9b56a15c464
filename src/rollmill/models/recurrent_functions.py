"""More exact versions of two functions that transformers' recurrent layers call.

- The gated delta rule in chunks (Qwen3-Next, Qwen3.5, OLMo hybrid). transformers computes the decay between two
  positions from the difference of two sums over the chunk. These sums reach thousands, so the difference of two
  neighbours, which may be close to 0, is off by up to 1e-4. Here each decay is a sum of its own.
- The single step of Mamba 2. transformers limits the step size (`time_step_limit`) in its pass over several tokens,
  but not in the pass over one, so that a decoded token would have another probability in training.

Shapes: n sequences, S their length, H value heads, K key size, V value size, N chunks of C tokens.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

_DELTA_RULE = "torch_chunk_gated_delta_rule"
_STEP = "mamba2_selective_state_update"
_EPS = 1e-6  # of the norms of queries and keys, as in transformers


@functools.cache
def use_exact_functions(name: str) -> None:
    """Replaces both functions, for the whole process, in the module `name` of transformers, if it has them.

    The gated delta rule stays as it is where the library `fla` computes it.
    """
    module: Any = sys.modules[name]
    if hasattr(module, _DELTA_RULE) and find_spec("fla") is None:
        setattr(module, _DELTA_RULE, chunk_gated_delta_rule)
    if hasattr(module, _STEP):
        setattr(module, _STEP, _limit_step(getattr(module, _STEP)))


def step_limit(layer: nn.Module) -> dict[str, tuple[float, float]]:
    """Returns the argument with which a Mamba 2 layer limits the step size of a single token; {} without a limit."""
    limit = getattr(layer, "time_step_limit", None)
    known = hasattr(sys.modules[type(layer).__module__], _STEP)
    return {"dt_limit": tuple(limit)} if known and limit and tuple(limit) != (0.0, math.inf) else {}


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule (arXiv:2412.06464, section 3.3) over several tokens, in float32 or float64.

    Args:
        query: [n, S, key heads, K]; each key head serves H / key heads value heads.
        key: as `query`.
        value: [n, S, H, V].
        g: logs of the decays [n, S, H].
        beta: strengths of the updates [n, S, H].
        chunk_size: most tokens that are computed together.
        initial_state: [n, H, K, V]; None: zeros.
        output_final_state: also returns the state after the last token.
        use_qk_l2norm_in_kernel: normalises queries and keys.

    Returns:
        output [n, S, H, V] of `query`'s type, and the state [n, H, K, V] or None.
    """
    result_type, dtype = query.dtype, torch.promote_types(query.dtype, torch.float32)
    length, heads = value.shape[1:3]
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    q, k, v, decay, rate = (x.transpose(1, 2).to(dtype) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS) for x in (q, k))
    size = min(chunk_size, length)
    q, k, v, rate = (_chunks(x, size) for x in (q * q.shape[-1] ** -0.5, k, v, rate[..., None]))  # [n, H, N, C, ...]
    decay = _chunks(decay[..., None], size)[..., 0]
    between = _decays_between(decay)
    from_start = decay.cumsum(-1).exp()[..., None]
    to_end = between[..., -1, :, None]
    # Updates within a chunk depend on each other: a triangular system gives what each adds to the state (new) and
    # what it takes from the state before the chunk (read).
    system = (rate * k) @ k.mT * between
    added = torch.cat([rate * v, rate * k * from_start], -1)
    new, read = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    scores, q, k = q @ k.mT * between, q * from_start, k * to_end
    state, outputs = initial_state if initial_state is None else initial_state.to(dtype), []
    for i in range(new.shape[2]):
        update = new[:, :, i] if state is None else new[:, :, i] - read[:, :, i] @ state
        output = scores[:, :, i] @ update
        outputs.append(output if state is None else output + q[:, :, i] @ state)
        own = k[:, :, i].mT @ update
        state = own if state is None else state * from_start[:, :, i, -1, None] + own
    result = torch.cat(outputs, 2)[:, :, :length].transpose(1, 2).to(result_type, memory_format=torch.contiguous_format)
    return result, state if output_final_state else None


def _chunks(x: Tensor, size: int) -> Tensor:
    """Splits [n, H, S, d] into [n, H, N, C, d], padded with zeros at the end."""
    chunks: Tensor = pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))
    return chunks


def _decays_between(decay: Tensor) -> Tensor:
    """Part of what token j added that is left at token i, [..., C, C]: exp of the decays of j + 1 to i; 0 for j > i."""
    size = decay.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril()
    steps = decay[..., None].expand(*decay.shape, size).masked_fill(~lower.tril(-1), 0)
    return steps.cumsum(-2).masked_fill(~lower, -math.inf).exp()


def _limit_step(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps Mamba 2's single step: it limits the step size if it is given a `dt_limit`."""

    @functools.wraps(own)
    def step(
        state: Tensor,
        hidden: Tensor,
        dt: Tensor,
        *others: Tensor,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if dt_limit is not None:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
            dt_bias, dt_softplus = None, False
        return own(state, hidden, dt, *others, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)

    return step
