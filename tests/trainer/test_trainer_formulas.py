"""The trainer's gradient is that of the algorithm's formula, written out here over plain transformers' log-probs.

Both sides hold advantages in float32, as the trainer does. Float64 models agree less closely than they could, because
transformers computes norms in float32 and the trainer keeps weights per token in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_batches import (
    batch_for,
    distance,
    gradient,
    options_of,
    padded_logprobs,
    plain_logprobs,
    record,
    trainer_of,
    watch_gradients,
)
from torch import Tensor

from rollmill.core import Experience

BOUNDS = {torch.float32: 1e-5, torch.float64: 2e-6}


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def _group(batch: list[Experience], e: Experience) -> list[float]:
    return [o.reward for o in batch if o.group == e.group]


def _centred(batch: list[Experience], e: Experience) -> float:
    return float(np.float32(e.reward - np.mean(_group(batch, e))))


def _normalised(batch: list[Experience], e: Experience) -> float:
    return float(np.float32((e.reward - np.mean(_group(batch, e))) / (np.std(_group(batch, e), ddof=1) + 1e-6)))


def _clip(log_ratio: Tensor, advantage: Tensor | float, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def _recorded(e: Experience) -> Tensor:
    return torch.from_numpy(e.logprobs[e.action_mask])


Lists = list[Tensor]


def _grpo(batch: list[Experience], own: Lists, reference: Lists) -> Tensor:
    terms = [_clip(lp - _recorded(e), _normalised(batch, e), 0.2, 0.2) for e, lp in zip(batch, own, strict=True)]
    return torch.cat(terms).mean()


def _gspo(batch: list[Experience], own: Lists, reference: Lists) -> Tensor:
    pairs = list(zip(batch, own, strict=True))
    return _mean([_clip((lp - _recorded(e)).mean(), _normalised(batch, e), 3e-4, 4e-4) for e, lp in pairs])


def _topr(batch: list[Experience], own: Lists, reference: Lists) -> Tensor:
    losses = []
    for e, lp in zip(batch, own, strict=True):
        ratio = (lp.detach() - _recorded(e)).sum().exp()
        weight = 1.0 if _centred(batch, e) >= 0 else min(float(ratio), 1.0)
        losses.append(-weight * _centred(batch, e) * lp.sum())
    return _mean(losses)


def _kimi(batch: list[Experience], own: Lists, reference: Lists) -> Tensor:
    pairs = list(zip(batch, own, strict=True))
    return _mean([(_centred(batch, e) - 0.1 * (lp - _recorded(e)).sum()) ** 2 for e, lp in pairs])


def _sppo(batch: list[Experience], own: Lists, reference: Lists) -> Tensor:
    pairs = list(zip(batch, own, strict=True))
    return _mean([((lp - _recorded(e)).sum() - _centred(batch, e) / 0.5) ** 2 for e, lp in pairs])


def _margins(batch: list[Experience], own: Lists, reference: Lists) -> Lists:
    gain = {e.id: lp.sum() - ref.sum() for e, lp, ref in zip(batch, own, reference, strict=True)}
    return [gain[f"{group}-1"] - gain[f"{group}-0"] for group in {e.group for e in batch}]


def _dpo(batch: list[Experience], own: Lists, reference: Lists) -> Tensor:
    return _mean([-torch.log(1 / (1 + torch.exp(-0.1 * margin))) for margin in _margins(batch, own, reference)])


def _ipo(batch: list[Experience], own: Lists, reference: Lists) -> Tensor:
    return _mean([(margin - 1 / (2 * 0.1)) ** 2 for margin in _margins(batch, own, reference)])


FORMULAS: dict[str, tuple[str, dict[str, Any], Callable[..., Tensor]]] = {
    "grpo": ("grpo", {"aggregation": "token-mean"}, _grpo),
    "gspo": ("gspo", {}, _gspo),
    "topr": ("topr", {}, _topr),
    "kimi": ("kimi", {}, _kimi),
    "sppo": ("sppo", {"loss": {"beta": 0.5}}, _sppo),
    "dpo": ("dpo", {}, _dpo),
    "ipo": ("dpo", {"loss": "ipo"}, _ipo),
}


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=["fp32", "float64"])
@pytest.mark.parametrize("forward", [plain_logprobs, padded_logprobs], ids=["unpacked", "padded"])
@pytest.mark.parametrize("formula", list(FORMULAS))
def test_gradient_equals_the_formula_written_out(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, formula: str, forward: Any, dtype: torch.dtype
) -> None:
    name, keys, written_out = FORMULAS[formula]
    options, model, reference = options_of(name, **keys), toy("qwen3").to(dtype), toy("qwen3", seed=5).to(dtype)
    batch = batch_for(make_batch, options)
    record(model, batch, 3e-4 if name == "gspo" else 0.1)
    gradients, own = watch_gradients(monkeypatch), forward(model, batch)
    loss = written_out(batch, own, [each.detach() for each in forward(reference, batch)])
    expected = gradient(loss, model)
    metrics = trainer_of(model, options, reference=reference).step(batch, 1)  # stale: ratios to the recorded log-probs
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert distance(gradients["policy"][0], expected) < BOUNDS[dtype]
