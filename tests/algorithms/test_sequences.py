"""Per-sequence sums and means of flat tokens."""

from __future__ import annotations

import torch

from rollmill.algorithms.aggregation import (
    expand_to_tokens,
    mean_by_sequence,
    sum_by_sequence,
    token_sequence_mean,
    token_sequence_sum,
)

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
SEQUENCE = torch.tensor([2, 0, 2, 0, 2])  # interleaved; nothing belongs to 1


def test_sums_and_means_find_sequences_by_id() -> None:
    assert sum_by_sequence(VALUES, SEQUENCE).tolist() == [10, 0, 21]
    assert sum_by_sequence(VALUES, SEQUENCE, 4).tolist() == [10, 0, 21, 0]
    assert mean_by_sequence(VALUES, SEQUENCE).tolist() == [5, 0, 7]
    assert expand_to_tokens(torch.tensor([5, 6, 7]), SEQUENCE).tolist() == [7, 5, 7, 5, 7]
    assert token_sequence_sum(VALUES, SEQUENCE).tolist() == [21, 10, 21, 10, 21]
    assert token_sequence_mean(VALUES, SEQUENCE).tolist() == [7, 5, 7, 5, 7]


def test_no_tokens_are_no_sequences() -> None:
    nothing, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert sum_by_sequence(nothing, nobody).shape == (0,)
    assert token_sequence_mean(nothing, nobody).shape == (0,)
    assert mean_by_sequence(nothing, nobody, 2).tolist() == [0, 0]


def test_gradients_flow_through_both() -> None:
    weight = torch.tensor([3.0, 1.0, 5.0], dtype=torch.float64)
    for function, expected in ((sum_by_sequence, [5, 3, 5, 3, 5]), (mean_by_sequence, [5 / 3, 1.5, 5 / 3, 1.5, 5 / 3])):
        values = VALUES.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((weight * function(values, SEQUENCE)).sum(), values)
        torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))
