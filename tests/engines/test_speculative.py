"""The rule of acceptance, by enumeration: whatever was drafted, what comes out follows the new distribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmill.engines.native.draft_verifier import DraftBatch, acceptance_probability, residual_weights
from rollmill.engines.native.sampler import SamplingTensors, normalized_probs, select_top_tokens, truncated_probs

CPU = torch.device("cpu")
OLD, NEW = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)


def outcome(old_V: Tensor, new_V: Tensor, known: int, *, biased: bool = False) -> Tensor:
    """Distribution of the token that comes out, summed over all drafted tokens and both answers. Exact, [V].

    `biased`: what is rejected is drawn from the new distribution itself.
    """
    vocab = len(old_V)
    ids, probs = select_top_tokens(old_V[None], known)
    drafted = DraftBatch(torch.arange(vocab), ids.expand(vocab, -1), probs.expand(vocab, -1))
    accepted_V = acceptance_probability(new_V, drafted)
    left_V = new_V if biased else residual_weights(new_V[None], DraftBatch(torch.zeros(1).long(), ids, probs))[0]
    rejected = (old_V * (1 - accepted_V)).sum()
    return old_V * accepted_V + rejected * left_V / left_V.sum()


def test_golden() -> None:
    torch.testing.assert_close(outcome(OLD, NEW, 3), NEW, atol=1e-12, rtol=0)
    biased = outcome(OLD, NEW, 3, biased=True)
    torch.testing.assert_close(biased, torch.tensor([0.36, 0.36, 0.28], dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("known", [1, 2])
def test_golden_with_a_part_of_the_old_distribution(known: int) -> None:
    torch.testing.assert_close(outcome(OLD, NEW, known), NEW, atol=1e-12, rtol=0)
    drafted = DraftBatch(torch.arange(3), torch.tensor([[0]] * 3), torch.tensor([[0.5]] * 3).double())
    assert acceptance_probability(NEW, drafted).tolist() == [0.6, 0.0, 0.0]
    expected = [0.0, 0.3, 0.4]
    assert residual_weights(NEW[None], DraftBatch(*(each[:1] for each in drafted))).tolist() == [
        pytest.approx(expected)
    ]


def distribution(logits_V: Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> Tensor:
    params = SamplingTensors.of([(temperature, top_p, top_k, min_p)], CPU)
    return normalized_probs(*truncated_probs(logits_V[None], params), logits_V[None], params)[0].double()


@given(
    st.integers(2, 12),
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.floats(0, 3),
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.3]), st.sampled_from([0.5, 0.9, 1.0]), st.integers(0, 4)),
    st.tuples(st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.8, 1.0]), st.integers(0, 4)),
)
@settings(max_examples=150, deadline=None)
def test_exact_for_any_policies_and_any_sampling_settings(
    vocab: int,
    seed: int,
    known: int,
    change: float,
    before: tuple[float, float, int],
    after: tuple[float, float, int],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(vocab, generator=generator)
    old = distribution(logits, *before, 0.0)
    new = distribution(logits + change * torch.randn(vocab, generator=generator), *after, 0.05)
    torch.testing.assert_close(outcome(old / old.sum(), new / new.sum(), known), new / new.sum(), atol=1e-6, rtol=0)


@given(st.integers(2, 9), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_exact_for_any_guess(vocab: int, seed: int) -> None:
    new = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)
    for guess in range(vocab):
        sure = torch.zeros(vocab).double().index_fill(0, torch.tensor([guess]), 1.0)
        torch.testing.assert_close(outcome(sure, new, 1), new, atol=1e-9, rtol=0)


def test_equal_distributions_accept_everything_and_rounding_leaves_something() -> None:
    ids = torch.arange(3)[None]
    drafted = DraftBatch(torch.tensor([2]), ids, NEW[None])
    assert acceptance_probability(NEW[2:], drafted).tolist() == [1.0]
    assert residual_weights(NEW[None], drafted).tolist() == [NEW.tolist()]


def test_unused_places_of_known_tokens_mean_nothing() -> None:
    padded = DraftBatch(
        torch.tensor([0]), torch.tensor([[2, 0, 0, 0]]), torch.tensor([[0.2, 0.5, 0.0, 0.0]], dtype=torch.float64)
    )
    plain = DraftBatch(torch.tensor([0]), torch.tensor([[2, 0]]), torch.tensor([[0.2, 0.5]], dtype=torch.float64))
    assert acceptance_probability(NEW[:1], padded).tolist() == acceptance_probability(NEW[:1], plain).tolist()
    assert residual_weights(NEW[None], padded).tolist() == residual_weights(NEW[None], plain).tolist()
