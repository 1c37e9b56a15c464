"""Packed and prefix-shared log-probs equal plain transformers', one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollmill.models.attention import AttentionOptions
from rollmill.trainer import attention, attention_blocks
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention

CPU = torch.device("cpu")


def _plain(model: Any, batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropies = [], []
    for e in batch:
        ids = torch.from_numpy(e.token_ids).long()[None]
        temperature = 1.0 if e.source == "expert" else e.temperature
        log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / temperature, -1)
        positions = np.flatnonzero(e.action_mask)
        logprobs.append(log_p[positions - 1, ids[0, positions]])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[positions - 1])
    return torch.cat(logprobs), torch.cat(entropies)


def _packed(model: Any, batch: list[Any], budget: int, share: bool, chunk: int = 16) -> tuple[torch.Tensor, ...]:
    table = build_token_table(batch, CPU)
    pieces = []
    for micro in build_micro_batches(batch, table, range(len(batch)), budget, CPU, share_prefixes=share):
        with use_packed_attention(model, micro):
            pieces.append((micro.tokens, *compute_logprobs(model, micro, table, chunk=chunk, entropy_gradient=True)))
    tokens = torch.cat([p[0] for p in pieces])
    assert sorted(tokens.tolist()) == list(range(len(table.target)))
    order = tokens.argsort()
    return torch.cat([p[1] for p in pieces])[order], torch.cat([p[2] for p in pieces])[order]


CASES = [
    ("qwen3", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("llama", {"tie_word_embeddings": False, "mlp_bias": True}),
    ("gemma", {}),
    ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}),
]


@dataclass
class Plain:
    """A model, a batch, and what plain transformers makes of it: log-probs, entropies and gradients."""

    model: Any
    batch: list[Any]
    values: tuple[torch.Tensor, torch.Tensor]
    gradients: torch.Tensor


@pytest.fixture(scope="module", params=CASES, ids=[c[0] for c in CASES])
def plain(request: pytest.FixtureRequest, toy: Any, make_batch: Any) -> Plain:
    architecture, changes = request.param
    model, batch = toy(architecture, **changes), make_batch(demonstrations=2)
    values = _plain(model, batch)
    return Plain(model, batch, values, _gradients(model, values))


def _gradients(model: Any, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Those of a weighted sum of all log-probs and entropies."""
    logprobs, entropies = values
    weight = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (weight @ logprobs + weight.flip(0) @ entropies).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("budget", "kind"),
    [(1, "masked"), (60, "masked"), (60, "products"), (10_000, "masked"), (60, "no mask"), (10_000, "no mask")],
)
def test_values_and_gradients_equal_plain_forward(
    plain: Plain, share: bool, budget: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "prefers_products", lambda q, k: kind == "products")  # as bf16 on a CPU, in fp32
    monkeypatch.setattr(attention_blocks, "LONG", 0 if kind == "no mask" else 1 << 60)
    got = _packed(plain.model, plain.batch, budget, share)
    for a, b in zip(got, plain.values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    difference = _gradients(plain.model, got) - plain.gradients
    assert difference.norm() < 1e-5 * plain.gradients.norm()


def test_long_segments_of_interleaved_parents_attend_as_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact up to rounding in float64, and gradients of keys that several segments share are summed."""
    layout = attention.SegmentLayout((7, 3, 400, 380, 390, 400, 2), (-1, -1, 0, 1, 0, 1, 1))
    options = AttentionOptions(scaling=0.3)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, heads, sum(layout.lengths), 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weight = torch.randn(1, sum(layout.lengths), 4, 8, dtype=torch.float64, generator=generator)
    found = []
    for longest in (1 << 60, 100_000):
        monkeypatch.setattr(attention_blocks, "LONG", longest)
        output = attention.PackedAttention(layout, CPU).attend(leaves[0], leaves[1], leaves[2], options)
        found.append([output, *torch.autograd.grad((output * weight).sum(), leaves)])
    for masked, joined in zip(*found, strict=True):
        assert not torch.equal(masked, joined)
        torch.testing.assert_close(joined, masked, rtol=1e-11, atol=1e-12)


def test_nothing_grows_with_the_square_of_a_row(toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of a window and of a shared prompt, and scores of a soft-cap, forward and backward."""
    monkeypatch.setattr(attention_blocks, "MASK_ELEMENTS", 1 << 15)
    monkeypatch.setattr(attention_blocks, "SCORES", 1 << 15)
    model = toy("gemma2", sliding_window=150, attn_logit_softcapping=2.0, max_position_embeddings=2048)
    batch, ids = make_batch(groups=1, size=2), np.random.default_rng(0).integers(2, 23, (2, 1200)).astype(np.int32)
    for e, own in zip(batch, ids, strict=True):
        own[:700] = ids[0, :700]
        e.token_ids, e.action_mask = own, np.arange(1200) >= 700
        e.logprobs, e.versions = np.zeros(1200, np.float32), np.zeros(1200, np.int32)
    table = build_token_table(batch, CPU)
    [micro] = build_micro_batches(batch, table, range(2), 2048, CPU)
    largest = LargestTensor()
    with largest, use_packed_attention(model, micro):
        compute_logprobs(model, micro, table)[0].sum().backward()
    assert micro.input_ids.numel() > 1690
    assert largest.elements < 1690 * 1690 / 4
    assert any(p.grad is not None for p in model.parameters())


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple) else [found]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return found


def test_prefix_is_computed_once(toy: Any, make_batch: Any) -> None:
    batch = make_batch(groups=2, size=6)
    table = build_token_table(batch, CPU)
    shared = build_micro_batches(batch, table, range(12), 10_000, CPU)
    single = build_micro_batches(batch, table, range(12), 10_000, CPU, share_prefixes=False)
    prefixes = {e.group: int(e.action_mask.argmax()) for e in batch}
    assert len(shared) == len(single) == 1
    saved = single[0].input_ids.numel() - shared[0].input_ids.numel()
    assert saved == 5 * sum(prefixes.values())


def test_a_siblings_tokens_change_nothing(toy: Any, make_batch: Any) -> None:
    model, batch = toy("qwen3"), make_batch(groups=1, size=4)
    before = _packed(model, batch, 10_000, True)[0]
    table = build_token_table(batch, CPU)
    victim = 2
    batch[victim].token_ids[int(batch[victim].action_mask.argmax()) :] = 7
    after = _packed(model, batch, 10_000, True)[0]
    others = table.experience != victim
    assert torch.equal(before[others], after[others])


def test_equal_lengths_need_no_padding_and_agree(toy: Any, make_batch: Any) -> None:
    model, batch = toy("llama"), make_batch(groups=2, size=3)
    for e in batch:
        start = int(e.action_mask.argmax())
        e.token_ids = np.resize(e.token_ids, start + 8).astype(np.int32)
        e.action_mask = np.arange(start + 8) >= start
        e.logprobs, e.versions = np.zeros(start + 8, np.float32), np.zeros(start + 8, np.int32)
    torch.testing.assert_close(_packed(model, batch, 10_000, True)[0], _plain(model, batch)[0], rtol=1e-5, atol=1e-5)


def test_micro_batches_keep_to_the_budget(make_batch: Any) -> None:
    batch = make_batch(groups=5, size=5)
    table = build_token_table(batch, CPU)
    micros = build_micro_batches(batch, table, range(25), 50, CPU)
    assert len(micros) > 3
    assert all(m.input_ids.numel() <= 50 for m in micros)
    assert sorted(i for m in micros for i in m.experiences) == list(range(25))


def test_experience_without_actions_and_action_at_first_token(toy: Any, make_batch: Any) -> None:
    batch = make_batch(groups=1, size=3)
    batch[0].action_mask[:] = False
    batch[1].action_mask[:] = True
    table = build_token_table(batch, CPU)
    assert table.lengths.tolist()[:2] == [0, len(batch[1].token_ids) - 1]
    micros = build_micro_batches(batch, table, range(3), 10_000, CPU)
    assert sorted(micros[0].experiences) == [1, 2]
