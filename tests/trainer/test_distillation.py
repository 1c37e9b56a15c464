"""Distillation from a teacher: gradients against formulas written out, and what a run makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.algorithm_batches import distance, flat, gradient, options_of, trainer_of, watch_gradients

from rollmill.types import Experience

BETA, TEMPERATURE = 0.3, 1.5


def _divergence(kind: str, p: torch.Tensor, q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Of probabilities p (policy) and q (teacher) [T, V] and the sampled tokens [T], written out."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum(-1)

    if kind == "sampled":
        log_p, log_q = (x.log().gather(1, token[:, None])[:, 0] for x in (p, q))
        return -(log_q - log_p).detach() * log_p
    mixture = BETA * q + (1 - BETA) * p
    if kind == "sampled_jsd":
        log_p, log_m = (x.log().gather(1, token[:, None])[:, 0] for x in (p, mixture))
        return -(1 - BETA) * (log_m - log_p).detach() * log_p
    return {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": BETA * kl(q, mixture) + (1 - BETA) * kl(p, mixture)}[
        kind
    ]


def _loss(kind: str, model: Any, teacher: Any, batch: list[Experience], temperature: float) -> torch.Tensor:
    terms = []
    for e in batch:
        ids = torch.from_numpy(e.token_ids).long()
        at = torch.from_numpy(e.action_mask).nonzero()[:, 0]
        p, q = (
            torch.softmax(each(input_ids=ids[None], use_cache=False).logits[0, at - 1].double() / temperature, -1)
            for each in (model, teacher)
        )
        terms.append(_divergence(kind, p, q.detach(), ids[at]))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd", "sampled", "sampled_jsd"])
@pytest.mark.parametrize(("budget", "chunk"), [(1, 3), (100_000, None)])
def test_loss_and_gradient_equal_the_formula(
    toy: Any,
    make_batch: Any,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    kind: str,
    budget: int,
    chunk: int | None,
) -> None:
    keys = {} if kind.startswith("sampled") else {"temperature": TEMPERATURE}
    keys |= {"beta": BETA} if kind.endswith("jsd") else {}
    options = options_of("jsd" if kind.endswith("jsd") else "distill", divergence=kind, **keys)
    model, teacher, batch = toy(architecture), toy(architecture, seed=7), make_batch()
    loss = _loss(kind, model, teacher, batch, keys.get("temperature", 1.0))
    expected = gradient(loss, model)
    watched = watch_gradients(monkeypatch)
    trainer = trainer_of(model, options, teacher=teacher, micro_batch_tokens=budget, logprob_chunk=chunk)
    metrics = trainer.step(batch, 0)
    assert metrics["loss/distill"] == pytest.approx(loss.item(), rel=1e-4)
    assert distance(watched["policy"][0], expected) < 1e-4


def test_a_teacher_is_followed_and_never_changed(toy: Any, make_batch: Any) -> None:
    teacher, batch = toy("qwen3", seed=7), make_batch()
    before = flat(teacher)
    trainer = trainer_of(toy("qwen3"), options_of("distill"), teacher=teacher, lr=1e-2)
    losses = [trainer.step(batch, n)["loss"] for n in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(flat(teacher), before)


def test_a_policy_equal_to_its_teacher_is_at_zero(toy: Any, make_batch: Any) -> None:
    for kind in ("reverse_kl", "forward_kl", "jsd", "sampled", "sampled_jsd"):
        trainer = trainer_of(toy("qwen3"), options_of("distill", divergence=kind), teacher=toy("qwen3"))
        metrics = trainer.step(make_batch(), 0)
        assert abs(metrics["loss"]) < 1e-6
        assert metrics["grad_norm"] < 1e-5
