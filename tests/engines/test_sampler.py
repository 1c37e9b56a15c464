"""Two-level sampling, truncation and counter-based randomness against direct definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engines.native.sampler import SamplingTensors, sample_inverse_cdf, sample_tokens, truncated_probs
from rollmill.seeds import counter_uniforms, derive_seed

CPU = torch.device("cpu")


def params_of(
    rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> SamplingTensors:
    return SamplingTensors.of([(temperature, top_p, top_k, min_p)] * rows, CPU)


@given(st.integers(1, 700), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
@settings(max_examples=80, deadline=None)
def test_inverse_cdf_is_the_inverse_of_the_cumulative_sum(vocab: int, seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(1, vocab, generator=generator).double() * (torch.rand(1, vocab, generator=generator) < 0.7)
    weights[0, seed % vocab] += 0.5
    index = int(sample_inverse_cdf(weights, torch.tensor([u]).double()))
    total = weights.sum()
    assert weights[0, index] > 0
    assert weights[0, :index].sum() <= u * total * (1 + 1e-9) + 1e-12
    assert weights[0, : index + 1].sum() >= u * total * (1 - 1e-9) - 1e-12


def test_large_vocabulary_draws_follow_the_distribution() -> None:
    vocab, n = 151_936, 4000
    logits = torch.zeros(1, vocab)
    logits[0, [5, 70_000, 151_935]] = torch.tensor([12.0, 12.5, 11.5])
    probs = logits.double().softmax(-1)[0]
    uniform = torch.from_numpy(counter_uniforms(np.full(n, 3, np.uint64), np.arange(n, dtype=np.uint64)))
    tokens = torch.cat(
        [sample_tokens(logits.expand(50, -1), params_of(50), part).token_B for part in uniform.split(50)]
    )
    for token in (5, 70_000, 151_935):
        expected = float(probs[token])
        assert abs(float((tokens == token).float().mean()) - expected) < 4.5 * (expected * (1 - expected) / n) ** 0.5


@given(
    st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 1.7]), st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0, 1, 3, 40, 1000]), st.sampled_from([0.0, 0.05, 0.5]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_truncation_keeps_what_its_definition_says(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(seed)) * 3
    uniform = torch.rand(3, generator=torch.Generator().manual_seed(seed + 1)).double()
    tokens, logprobs, kept, *_ = sample_tokens(logits, params_of(3, temperature, top_p, top_k, min_p), uniform)
    probs = (logits / temperature).softmax(-1)
    for row in range(3):
        order = probs[row].argsort(descending=True)
        allowed = order[: top_k or None]
        share = probs[row, allowed] / probs[row, allowed].sum()
        before = share.cumsum(0) - share
        allowed = allowed[before < top_p - 1e-6]
        allowed = allowed[probs[row, allowed] >= min_p * probs[row].max() * (1 - 1e-6)]
        mass = probs[row, allowed].sum()
        assert int(tokens[row]) in allowed.tolist()
        torch.testing.assert_close(kept[row].exp(), mass, rtol=1e-3, atol=1e-5)
        full = (logits[row] / temperature).log_softmax(-1)[tokens[row]]
        torch.testing.assert_close(logprobs[row] + kept[row], full, rtol=0, atol=2e-5)


def test_top_p_keeps_no_token_beyond_a_sum_that_is_exactly_it() -> None:
    logits = torch.log(torch.tensor([[4.0, 2.0, 1.0, 1.0]]))
    assert logits.softmax(-1).tolist() == [[0.5, 0.25, 0.125, 0.125]]
    for top_p, expected in ((0.5, [0.5, 0, 0, 0]), (0.75, [0.5, 0.25, 0, 0])):
        kept, mass = truncated_probs(logits, params_of(1, top_p=top_p))
        assert (kept.tolist(), mass.tolist()) == ([expected], [top_p])


def test_rounding_selects_no_last_token_of_weight_zero() -> None:
    """The sum of these weights is rounded up in float32, so that the largest draw lies beyond all of them."""
    weights = torch.tensor([[1.0, 1.5 * 2**-24, 0.0]])
    assert float(weights.sum()) > float(weights.double().sum())
    assert sample_inverse_cdf(weights, torch.tensor([1 - 2**-53]).double()).tolist() == [1]


def test_greedy_rows_take_the_most_probable_token_beside_sampled_ones() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    params = SamplingTensors.of([(0.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0)] * 2, CPU)
    tokens, logprobs, *_ = sample_tokens(logits, params, torch.full((4,), 0.999).double())
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-6, rtol=0)


def test_uniforms_are_uniform_independent_and_reproducible() -> None:
    n = 100_000
    values = counter_uniforms(np.full(n, 12345, np.uint64), np.arange(n, dtype=np.uint64))
    assert values.min() >= 0
    assert values.max() < 1
    histogram = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((histogram - n / 100) ** 2 / (n / 100)).sum() < 160  # chi-square, 99 degrees of freedom, p = 1e-4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015
    neighbours = counter_uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64))
    assert abs(neighbours.mean() - 0.5) < 0.005
    assert np.array_equal(values, counter_uniforms(np.full(n, 12345, np.uint64), np.arange(n, dtype=np.uint64)))


@given(st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 1000)), min_size=2, max_size=40, unique=True))
def test_fold_separates_streams(pairs: list[tuple[int, int]]) -> None:
    assert len({derive_seed(seed, part) for seed, part in pairs}) == len(pairs)
    assert derive_seed(1, 2, 3) != derive_seed(1, 3, 2)
