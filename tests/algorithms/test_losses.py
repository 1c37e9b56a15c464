"""Policy losses against closed forms: values, and gradients by autograd in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmill.algorithms.aggregation import sequence_mean, sequence_sum_mean, sum_by_sequence
from rollmill.algorithms.losses import (
    chord_mu,
    chord_sft,
    cispo,
    clipped,
    importance_sft,
    opmd,
    policy_gradient,
    ppo_clip,
    raft,
    sapo,
    softmax_ppo,
    surrogate,
)
from rollmill.algorithms.sequence_losses import gspo, gspo_clipped, gspo_token, kimi_mirror, sppo, topr
from rollmill.algorithms.trust_region import dppo_masked, dppo_tv, rec, rec_clipped

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logprob, old_logprob, advantage, sequence) -> [tokens]."""


def _with_tokens(loss: Callable[..., Tensor], **options: object) -> Loss:
    return lambda lp, old, advantage, sequence: loss(lp, old, advantage, **options)


TOKEN_LOSSES: dict[str, Loss] = {
    "ppo": _with_tokens(ppo_clip),
    "surrogate": _with_tokens(surrogate),
    "cispo": _with_tokens(cispo),
    "sapo": _with_tokens(sapo),
    "softmax_ppo": _with_tokens(softmax_ppo),
    "rec": _with_tokens(rec),
    "rec-is": _with_tokens(rec, importance=True),
    "rec-two-side-is": _with_tokens(rec, clip="two-side", importance=True),
    "rec-ring": _with_tokens(rec, clip="ring"),
    "dppo_tv": _with_tokens(dppo_tv),
    "policy_gradient": lambda lp, old, advantage, sequence: policy_gradient(lp, advantage),
}
SEQUENCE_LOSSES: dict[str, Loss] = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "topr": topr,
    "kimi_mirror": kimi_mirror,
    "sppo": sppo,
}
#: What the on-policy gradient is, as a multiple of that of -A lp.
SCALE = {"kimi_mirror": 2 * 0.1, "sppo": 2 * 1e3}


def _f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _gradient(loss: Tensor, logprob: Tensor, weight: Tensor | None = None) -> Tensor:
    return torch.autograd.grad((loss if weight is None else weight * loss).sum(), logprob)[0]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, old_logprob, advantage (constant in a sequence), sequence: sequences interleaved at random."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sequence = torch.tensor(draw(st.permutations([i for i, n in enumerate(lengths) for _ in range(n)])))
    number = st.floats(-2, 2, width=32)
    advantage = _f64(*draw(st.lists(number, min_size=len(lengths), max_size=len(lengths))))[sequence]
    old = -_f64(*draw(st.lists(st.floats(0.25, 4, width=32), min_size=len(sequence), max_size=len(sequence))))
    step = _f64(*draw(st.lists(st.floats(-0.25, 0.25, width=32), min_size=len(sequence), max_size=len(sequence))))
    return old + step, old, advantage, sequence


@pytest.mark.parametrize("name", [*TOKEN_LOSSES, *SEQUENCE_LOSSES])
@given(batches())
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, batch: tuple[Tensor, ...]) -> None:
    old, advantage, sequence = batch[1:]
    logprob = old.clone().requires_grad_()
    lengths = torch.bincount(sequence)
    # GSPO's s_i A_i is a mean over tokens; the other sequence losses take sums. A spread value is summed T_i times.
    is_square = name in SCALE
    weight = (1 / lengths.double() if is_square else torch.ones(len(lengths), dtype=torch.float64))[sequence]
    loss = (TOKEN_LOSSES | SEQUENCE_LOSSES)[name](logprob, old, advantage, sequence)
    torch.testing.assert_close(_gradient(loss, logprob, weight), -SCALE.get(name, 1) * advantage, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(SEQUENCE_LOSSES))
@given(batches(), st.randoms())
def test_sequence_losses_depend_on_ids_not_on_order(name: str, batch: tuple[Tensor, ...], random: object) -> None:
    logprob, old, advantage, sequence = batch
    order = list(range(len(sequence)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = SEQUENCE_LOSSES[name](logprob, old, advantage, sequence)
    renumbered = 2 * (int(sequence.max()) - sequence) + 1  # other numbers, gaps among them
    shuffled = SEQUENCE_LOSSES[name](logprob[order], old[order], advantage[order], renumbered[order])
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*TOKEN_LOSSES, *SEQUENCE_LOSSES])
@given(batches())
def test_advantage_zero_gives_no_gradient_unless_documented(name: str, batch: tuple[Tensor, ...]) -> None:
    old, sequence = batch[1], batch[3]
    logprob = (old + 0.125).requires_grad_()
    loss = (TOKEN_LOSSES | SEQUENCE_LOSSES)[name](logprob, old, torch.zeros_like(old), sequence)
    assert (_gradient(loss, logprob) == 0).all() == (name not in ("kimi_mirror", "sppo", "dppo_tv"))


# PPO


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("advantage", [-2.0, -0.5, 0.5, 2.0])
def test_ppos_value_and_gradient_by_hand(advantage: float, dual_clip: float | None) -> None:
    """With the default bounds .8 and 1.2."""
    ratio = _f64(0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.4, 1.6, 3.0)
    old, a = torch.full_like(ratio, -0.7), torch.full_like(ratio, advantage)
    logprob = (old + ratio.log()).requires_grad_()
    if advantage > 0:
        objective, kept = ratio.clamp(max=1.2) * a, ratio < 1.2
    else:
        most = math.inf if dual_clip is None else dual_clip
        objective, kept = ratio.clamp(min=0.8, max=most) * a, (ratio > 0.8) & (ratio < most)
    loss = ppo_clip(logprob, old, a, dual_clip=dual_clip)
    torch.testing.assert_close(loss, -objective)
    torch.testing.assert_close(_gradient(loss, logprob), -kept.double() * ratio * a)
    assert torch.equal(clipped(logprob, old, a, dual_clip=dual_clip), ~kept)


def test_the_surrogate_is_not_clipped() -> None:
    ratio, advantage = _f64(0.1, 0.5, 1.0, 3.0, 9.0), _f64(2, -0.5, 1, -3, 0.7)
    old = _f64(-3, -1, -2, -4, -5)
    logprob = (old + ratio.log()).requires_grad_()
    loss = surrogate(logprob, old, advantage)
    torch.testing.assert_close(loss, -ratio * advantage)
    torch.testing.assert_close(_gradient(loss, logprob), -ratio * advantage)


def test_tokens_at_a_bound_and_without_an_advantage_are_not_clipped() -> None:
    same = _f64(-1.0)
    for advantage in (-1.0, 1.0):
        assert not clipped(same, same, _f64(advantage), clip_low=0.0, clip_high=0.0, dual_clip=1.0)
    for other in (-3.0, 3.0):
        assert not clipped(same, same + other, _f64(0.0), dual_clip=1.0)


def test_sapo_takes_tau_by_the_sign_of_the_advantage() -> None:
    ratio = _f64(1.5)
    for advantage, tau in ((0.5, 1.0), (2.0, 1.0), (-0.5, 1.05)):
        expected = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
        torch.testing.assert_close(sapo(ratio.log(), _f64(0.0), _f64(advantage)), expected)


# GSPO


def test_gspo_golden() -> None:
    """Ratios 1.2 and .9: s = sqrt(1.08) = 1.03923; gradient s A mean_t grad lp_t."""
    logprob, old, sequence = _f64(math.log(1.2), math.log(0.9)).requires_grad_(), _f64(0, 0), torch.tensor([0, 0])
    for loss in (gspo, gspo_token):
        value = loss(logprob, old, _f64(2, 2), sequence, clip_low=0.2, clip_high=0.2)
        assert value.tolist() == pytest.approx([-2 * 1.03923] * 2, abs=1e-5)
        weight = sequence_mean(torch.tensor([2])).double()[sequence]
        gradient = _gradient(value, logprob, weight)
        assert gradient.tolist() == pytest.approx([-2 * math.sqrt(1.08) / 2] * 2)


def test_gspo_clips_whole_sequences_at_its_own_bounds() -> None:
    logprob = _f64(0.002, -0.001, 0.0006, 0.0, -0.0008, 0.0).requires_grad_()
    sequence = torch.tensor([0, 0, 1, 1, 2, 2])  # mean log-ratios 5e-4, 3e-4, -4e-4
    up, zero = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    assert gspo_clipped(logprob, zero, up, sequence).tolist() == [True, True] + [False] * 4
    assert gspo_clipped(logprob, zero, -up, sequence).tolist() == [False] * 4 + [True, True]
    for sign in (1, -1):
        for loss in (gspo, gspo_token):
            gradient = _gradient(loss(logprob, zero, sign * up, sequence), logprob)
            assert ((gradient == 0) == gspo_clipped(logprob, zero, sign * up, sequence)).all()


@given(batches())
def test_gspo_token_is_gspo_where_the_advantage_is_constant(batch: tuple[Tensor, ...]) -> None:
    logprob, old, advantage, sequence = batch
    logprob.requires_grad_()
    values = [f(logprob, old, advantage, sequence) for f in (gspo, gspo_token)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(_gradient(v, logprob) for v in values))


def test_gspo_token_gives_each_token_its_own_advantage() -> None:
    logprob, old, advantage = _f64(0.1, -0.1).requires_grad_(), _f64(0, 0), _f64(1, -3)
    loss = gspo_token(logprob, old, advantage, torch.tensor([0, 0]), clip_low=0.5, clip_high=0.5)
    torch.testing.assert_close(_gradient(loss, logprob), -advantage)  # s = exp(0) = 1


# Losses without or with a detached ratio


def test_policy_gradient_opmd_and_raft() -> None:
    logprob, advantage = _f64(-1, -2, -3).requires_grad_(), _f64(0.5, -2, 0)
    assert policy_gradient(logprob, advantage).tolist() == [0.5, -4, 0]
    assert opmd(logprob, advantage).tolist() == [0.25, -2, 0]
    assert opmd(logprob, advantage, tau=3).tolist() == [0.125, -1, 0]
    assert raft(logprob, advantage).tolist() == [1, 0, 0]
    assert _gradient(raft(logprob, advantage), logprob).tolist() == [-1, 0, 0]


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprob, old = torch.log(_f64(0.1, 1.1, 9)).requires_grad_(), _f64(0, 0, 0)
    for advantage in (_f64(2, 2, 2), _f64(-2, -2, -2)):
        torch.testing.assert_close(_gradient(cispo(logprob, old, advantage), logprob), -advantage * _f64(0.1, 1.1, 5))
        narrow = cispo(logprob, old, advantage, clip_low=0.5, clip_high=0.2)
        torch.testing.assert_close(narrow, -advantage * _f64(0.5, 1.1, 1.2) * logprob)


@given(st.floats(-3, 3), st.sampled_from([1.5, -1.5]))
def test_sapo_gradient_is_gated(log_ratio: float, sign: float) -> None:
    logprob = _f64(log_ratio).requires_grad_()
    loss = sapo(logprob, _f64(0), _f64(sign))
    tau, ratio = 1.0 if sign > 0 else 1.05, math.exp(log_ratio)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert loss.item() == pytest.approx(-4 / tau * gate * sign, rel=1e-12)
    assert _gradient(loss, logprob).item() == pytest.approx(-4 * gate * (1 - gate) * ratio * sign, rel=1e-9)


def test_softmax_ppo_stops_outside_of_symmetric_bounds() -> None:
    logprob = torch.log(_f64(0.7, 0.8, 1.0, 1.25, 1.4)).requires_grad_()  # bounds 1/1.3 = .769 and 1.3
    for sign in (1.0, -1.0):
        loss = softmax_ppo(logprob, torch.zeros(5).double(), torch.full((5,), sign).double())
        torch.testing.assert_close(loss, -sign * torch.log(_f64(1 / 1.3, 0.8, 1, 1.25, 1.3)))
        assert _gradient(loss, logprob).tolist() == [0, -sign, -sign, -sign, 0]


# Whole sequences


def test_topr_tapers_negative_sequences_only() -> None:
    logprob = torch.log(_f64(0.5, 0.5, 2, 3, 0.1, 1)).requires_grad_()
    sequence = torch.tensor([0, 0, 1, 1, 2, 2])  # products .25, 6, .1
    advantage = _f64(-1, -1, -2, -2, 3, 3)
    loss = topr(logprob, torch.zeros(6).double(), advantage, sequence)
    torch.testing.assert_close(_gradient(loss, logprob), -advantage * _f64(0.25, 0.25, 1, 1, 1, 1))


def test_topr_expected_gradient_by_enumeration() -> None:
    """Samples from mu: sum_{R>=0} mu R grad log pi + sum_{R<0} min(pi, mu) R grad log pi, over two tokens of 3."""
    logits = _f64(0.3, -0.2, 0.5).requires_grad_()
    log_pi, log_mu = torch.log_softmax(logits, 0), torch.log(_f64(0.2, 0.5, 0.3))
    reward = {y: math.sin(1 + 3 * y[0] + 5 * y[1]) for y in itertools.product(range(3), repeat=2)}
    assert min(reward.values()) < 0 < max(reward.values())
    got, expected = torch.zeros(3).double(), torch.zeros(3).double()
    for sample, r in reward.items():
        index = torch.tensor(sample)
        loss = topr(log_pi[index], log_mu[index], torch.full((2,), r, dtype=torch.float64), torch.tensor([0, 0]))
        weight = sequence_sum_mean(torch.tensor([2])).double().item()
        mu, pi = (p[index].sum().exp().item() for p in (log_mu, log_pi))
        got -= mu * weight * torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]
        score = torch.autograd.grad(log_pi[index].sum(), logits, retain_graph=True)[0]
        expected += (mu if r >= 0 else min(pi, mu)) * r * score
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@given(batches())
def test_kimi_mirror_has_the_published_gradient(batch: tuple[Tensor, ...]) -> None:
    """-2 tau [A grad lp(y) - (tau / 2) grad (lp - lp_old)^2(y)], mean over sequences."""
    logprob, old, advantage, sequence = batch
    logprob.requires_grad_()
    tau, lengths = 0.5, torch.bincount(sequence)
    loss = kimi_mirror(logprob, old, advantage, sequence, tau=tau)
    got = _gradient(loss, logprob, sequence_mean(lengths)[sequence].double())
    log_ratio = sum_by_sequence((logprob - old).detach(), sequence)[sequence]
    expected = -2 * tau * (advantage - tau * log_ratio) / len(lengths)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # the weights are float32


def test_sppo_is_least_where_the_log_ratio_is_the_advantage_over_beta() -> None:
    sequence, old = torch.tensor([0, 1, 0]), _f64(-1, -1, -1)
    advantage = _f64(0.25, -0.5, 0.25)
    best = old + _f64(1.5, -5, 1)  # sums 2.5 and -5
    assert sppo(best, old, advantage, sequence, beta=0.1).tolist() == pytest.approx([0, 0, 0], abs=1e-20)
    assert sppo(old, old, advantage, sequence, beta=0.1).tolist() == pytest.approx([6.25, 25, 6.25])
    assert sppo(old, old, advantage, sequence).tolist() == pytest.approx([62500, 250000, 62500])


# Trust regions


RATIOS = (0.3, 0.7, 0.9, 1.0, 1.1, 1.5, 3.5)


@pytest.mark.parametrize(
    ("clip", "sign", "dropped"),
    [
        ("one-side", 1, [0, 0, 0, 0, 0, 1, 1]),
        ("one-side", -1, [1, 1, 0, 0, 0, 0, 0]),
        ("two-side", 1, [1, 1, 0, 0, 0, 1, 1]),
        ("two-side", -1, [1, 1, 0, 0, 0, 1, 1]),
        ("ring", 1, [0, 1, 0, 0, 0, 1, 1]),
        ("ring", -1, [1, 1, 0, 0, 0, 1, 0]),
    ],
)
def test_rec_drops_tokens_and_weighs_the_rest(clip: str, sign: int, dropped: list[int]) -> None:
    logprob, old = torch.log(_f64(*RATIOS)).requires_grad_(), torch.zeros(len(RATIOS)).double()
    advantage = torch.full_like(old, 2.0 * sign)
    kept = 1 - _f64(*dropped)
    assert rec_clipped(logprob, old, advantage, clip=clip).tolist() == [bool(d) for d in dropped]  # type: ignore[arg-type]
    for importance, weight in ((False, torch.ones_like(old)), (True, _f64(*RATIOS))):
        loss = rec(logprob, old, advantage, clip=clip, importance=importance)  # type: ignore[arg-type]
        torch.testing.assert_close(_gradient(loss, logprob), -advantage * weight * kept)


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize(
    ("clip", "positive", "negative"),
    [
        ("one-side", ".....xx", "xxx...."),
        ("two-side", "xxx..xx", "xxx..xx"),
        ("ring", ".xx..xx", "xxx..x."),  # too far off on the side that A corrects is kept again
    ],
)
def test_rec_takes_each_bound_on_its_own_side(clip: str, positive: str, negative: str, importance: bool) -> None:
    """Bounds .9 and 1.3, and far ones .6 and 1.9."""
    bounds = {"clip": clip, "clip_low": 0.1, "clip_high": 0.3, "far_low": 0.4, "far_high": 0.9}
    ratio = _f64(0.5, 0.7, 0.85, 0.95, 1.2, 1.5, 2.2)
    old = torch.full_like(ratio, -1.3)
    logprob = (old + ratio.log()).requires_grad_()
    for size in (0.5, 2.0):
        for advantage, marks in ((size, positive), (-size, negative)):
            a, dropped = torch.full_like(ratio, advantage), torch.tensor([mark == "x" for mark in marks])
            found = rec_clipped(logprob, old, a, **bounds)  # type: ignore[arg-type]
            assert torch.equal(found, dropped)
            assert not found.requires_grad
            loss = rec(logprob, old, a, importance=importance, **bounds)  # type: ignore[arg-type]
            weight = ratio if importance else 1.0
            torch.testing.assert_close(loss, torch.where(dropped, 0, -weight * a * logprob.detach()))
            torch.testing.assert_close(_gradient(loss, logprob), torch.where(dropped, 0, -weight * a))
            if not importance:
                assert torch.equal(rec(logprob, old, a, **bounds), loss)  # type: ignore[arg-type]
            if clip == "one-side":
                assert torch.equal(rec_clipped(logprob, old, a, clip_low=0.1, clip_high=0.3), dropped)
    zero = torch.zeros_like(ratio)
    if clip == "ring":  # nothing to correct
        assert rec_clipped(logprob, old, zero, **bounds).tolist() == [True, True, True, False, False, True, True]  # type: ignore[arg-type]


def test_rec_and_dppo_take_bounds_as_inside() -> None:
    same, a = _f64(-1.0), _f64(1.0)
    for clip in ("one-side", "two-side", "ring"):
        assert not rec_clipped(same, same, a, clip=clip, clip_low=0.0, clip_high=0.0)  # type: ignore[arg-type]
    assert not dppo_masked(same, same, a, bound_high=0.0)
    assert not dppo_masked(same, same, -a, bound_low=0.0)
    twice = same + math.log(2)  # far_high 1 and far_low 0 are reached exactly, and are far
    assert math.exp(math.log(2)) == 2
    assert not rec_clipped(twice - same, same - same, -a, clip="ring", far_high=1.0)
    assert rec_clipped(twice - same, same - same, -a, clip="ring", far_high=1.1)
    assert not rec_clipped(same, same, a, clip="ring", clip_low=-0.5, far_low=0.0)


def test_dppo_by_default_bounds_moves_by_a_fifth_and_penalises_a_thousandth() -> None:
    probability, rollout = _f64(0.45, 0.69, 0.71, 0.31, 0.29), torch.full((5,), 0.5).double().log()
    for advantage, dropped in ((0.5, [2]), (-0.5, [4]), (2.0, [2])):
        a, kept = torch.full_like(probability, advantage), torch.ones(5).double()
        kept[dropped] = 0
        ratio = probability / 0.5
        expected = -kept * a * ratio + 1e-3 * ratio.log() ** 2
        torch.testing.assert_close(dppo_tv(probability.log(), rollout, a), expected)


@given(batches())
def test_rec_one_side_with_importance_has_the_gradient_of_ppo(batch: tuple[Tensor, ...]) -> None:
    logprob, old, advantage, _ = batch
    logprob.requires_grad_()
    bounds = {"clip_low": 0.1, "clip_high": 0.15}
    ours = _gradient(rec(logprob, old, advantage, importance=True, **bounds), logprob)
    ppo = _gradient(ppo_clip(logprob, old, advantage, **bounds), logprob)
    torch.testing.assert_close(ours, ppo)
    assert (ppo[clipped(logprob, old, advantage, **bounds)] == 0).all()


def test_dppo_measures_the_move_of_the_probability() -> None:
    """pi - mu: .3, -.3, .1; the ratio 3 of the last token is no reason to drop it."""
    probability, rollout = _f64(0.8, 0.3, 0.15), torch.log(_f64(0.5, 0.6, 0.05))
    logprob = probability.log().requires_grad_()
    ratio = probability / rollout.exp()
    for advantage, dropped in ((_f64(2, 2, 2), [True, False, False]), (_f64(-2, -2, -2), [False, True, False])):
        assert dppo_masked(logprob, rollout, advantage).tolist() == dropped
        kept = 1 - torch.tensor(dropped).double()
        loss = dppo_tv(logprob, rollout, advantage)
        torch.testing.assert_close(loss, -kept * advantage * ratio + 1e-3 * ratio.log() ** 2)
        torch.testing.assert_close(_gradient(loss, logprob), -kept * advantage * ratio + 2e-3 * ratio.log())
    assert dppo_masked(logprob, rollout, _f64(0, 0, 0)).tolist() == [False, True, False]


def test_dppo_bounds_moves_up_where_the_advantage_is_positive_and_moves_down_elsewhere() -> None:
    """pi - mu: .3, .1, -.1, -.3; a move of .3 is within one of the bounds, .2 and .4, and beyond the other."""
    probability, rollout = _f64(0.8, 0.6, 0.4, 0.2), torch.full((4,), 0.5).double().log()
    logprob, ratio = probability.log().requires_grad_(), probability / 0.5
    for low, high, dropped in ((0.2, 0.4, "....  ...x"), (0.4, 0.2, "x...  ....")):
        for sign, marks in zip((1.0, -1.0), dropped.split(), strict=True):
            bounds, advantage = {"bound_low": low, "bound_high": high}, torch.full_like(probability, sign)
            assert dppo_masked(logprob, rollout, advantage, **bounds).tolist() == [mark == "x" for mark in marks]
            kept = _f64(*(mark == "." for mark in marks))
            loss = dppo_tv(logprob, rollout, advantage, kl=0.0, **bounds)
            torch.testing.assert_close(_gradient(loss, logprob), -kept * advantage * ratio)


@given(batches())
def test_gspo_clips_where_its_gradient_is_gone(batch: tuple[Tensor, ...]) -> None:
    """With the default bounds, and with wider ones that differ."""
    logprob, old, advantage, sequence = batch
    logprob.requires_grad_()
    for bounds in ({}, {"clip_low": 0.05, "clip_high": 0.15}):
        for loss in (gspo, gspo_token):
            gradient = _gradient(loss(logprob, old, advantage, sequence, **bounds), logprob)
            dropped = gspo_clipped(logprob, old, advantage, sequence, **bounds)
            torch.testing.assert_close((gradient == 0)[advantage != 0], dropped[advantage != 0])


# Expert tokens


def test_chord_weighs_expert_tokens_by_p_times_one_minus_p() -> None:
    p = _f64(0.01, 0.5, 0.9, 1.0)
    logprob = p.log().requires_grad_()
    loss = chord_sft(logprob)
    torch.testing.assert_close(loss, -p * (1 - p) * p.log())
    torch.testing.assert_close(_gradient(loss, logprob), -p * (1 - p))


def test_importance_sft_has_the_gradient_of_the_probability() -> None:
    p = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    logprob = p.log().requires_grad_()
    loss = importance_sft(logprob)
    torch.testing.assert_close(loss.detach(), -p * p.log())
    gradient = torch.autograd.grad(loss.sum(), logprob)[0]
    of_probability = torch.autograd.grad(-logprob.exp().sum(), logprob)[0]
    torch.testing.assert_close(gradient, of_probability)


def test_chord_sft_has_no_gradient_beyond_the_cutoff() -> None:
    p = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    logprob = p.log().requires_grad_()
    loss = chord_sft(logprob, cutoff=0.6)
    golden = [0.16 * math.log(5), 0.25 * math.log(2), 0.16 * math.log(1 / 0.6)]
    assert loss.tolist() == pytest.approx(golden)
    assert torch.autograd.grad(loss.sum(), logprob)[0].tolist() == pytest.approx([-0.16, -0.25, 0])
    assert torch.equal(chord_sft(logprob, cutoff=1.0), chord_sft(logprob))


def test_chord_mu_rises_and_falls() -> None:
    options = {"warmup": 10, "decay": 40, "peak": 0.5, "valley": 0.1}
    expected = {0: 0.0, 5: 0.25, 10: 0.5, 20: 0.1 + 0.4 * (1 + math.sqrt(0.5)) / 2, 30: 0.3, 50: 0.1, 60: 0.1, 99: 0.1}
    assert {step: chord_mu(step, **options) for step in expected} == pytest.approx(expected)  # type: ignore[arg-type]
    assert chord_mu(0, warmup=0, decay=0, peak=0.9, valley=0.2) == 0.2
    assert chord_mu(0, warmup=0, decay=5, peak=0.9, valley=0.2) == pytest.approx(0.9)
