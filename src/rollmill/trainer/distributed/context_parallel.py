"""Context parallelism: the tokens of each row split over the ranks (DeepSpeed-Ulysses, arXiv:2309.14509).

Every rank holds the whole model and works on its share of a row's tokens. Just before attention the ranks exchange
tokens for heads: each then has all tokens of the row for its share of the heads, so that packed rows, windows and
soft-caps need nothing special. The outputs are exchanged back. Log-probs, and the [rows, vocabulary] logits that they
need, are computed where their tokens are; the numbers per prediction are then gathered, so that every rank computes the
same loss. Its gradient is each rank's part only, and gradients are summed.

Rank r of R has tokens r, r + R, r + 2R, ..., so prompts and completions are shared alike. Rows are padded to a multiple
of R; the added tokens end before attention.

Shapes: T tokens of the row, n = ceil(T / R) of this rank, H query heads, K key heads, D head size, V size of a value,
M predictions of the row, m of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rollmill.errors import ConfigError, ModelError
from rollmill.models.attention import AttentionContext, AttentionOptions
from rollmill.models.recurrent import RecurrentCall, recurrent_layers


def check_context_parallel(model: Any, ranks: int) -> None:
    """Checks that a model's rows can be shared by this number of ranks.

    Raises:
        ConfigError: it has recurrent layers, or the ranks do not divide its attention heads.
    """
    kind, instead = model.config.model_type, "use sharding: fsdp or none"
    if found := recurrent_layers(model):
        text = f"{kind} has recurrent layers ({type(found[0]).__name__}), which read a row from left to right"
        raise ConfigError(f"trainer.sharding: {text}, so its tokens cannot be shared (`context`); {instead}")
    heads = getattr(model.config.get_text_config(), "num_attention_heads", ranks)
    if heads % ranks:  # `attend` says so of layers that have numbers of their own
        raise ConfigError(f"trainer.ranks: {ranks} cannot share the {heads} attention heads of {kind}; {instead}")


@dataclass(frozen=True, eq=False)
class ContextShare:
    """One rank's share of a row of tokens, and of the predictions made from them."""

    rank: int
    ranks: int
    tokens: int  #: of the row, T
    rows: Tensor  #: int64 [m], index among the rank's tokens of the hidden states that make its predictions
    chosen: Tensor  #: int64 [m], indices of its predictions among the row's M
    predictions: int  #: M

    @staticmethod
    def of_row(rank: int, ranks: int, tokens: int, rows_M: Tensor) -> ContextShare:
        """Returns the share of a row of `tokens` tokens, in which those at `rows_M` predict."""
        chosen = (rows_M % ranks == rank).nonzero()[:, 0]
        return ContextShare(rank, ranks, tokens, rows_M[chosen] // ranks, chosen, len(rows_M))

    def take(self, values: Tensor, dim: int, fill: int = 0) -> Tensor:
        """Returns the values of this rank's tokens: T of `dim` become n; the added tokens have `fill`."""
        missing = -self.tokens % self.ranks
        if missing:
            values = pad(values, (*(0, 0) * (values.ndim - 1 - dim), 0, missing), value=fill)
        by_rank: Tensor = values.unflatten(dim, (-1, self.ranks))
        return by_rank.select(dim + 1, self.rank).contiguous()

    def take_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of the arguments of a forward pass with pictures (`build_picture_inputs`)."""
        own = {**inputs, "inputs_embeds": self.take(inputs["inputs_embeds"], 1)}
        own["position_ids"] = self.take(inputs["position_ids"], inputs["position_ids"].ndim - 1)
        if "visual_pos_masks" in inputs:
            places = inputs["visual_pos_masks"][0].nonzero()[:, 0]
            here = (places % self.ranks == self.rank).nonzero()[:, 0]
            own["visual_pos_masks"] = self.take(inputs["visual_pos_masks"], 1)
            own["deepstack_visual_embeds"] = [each[here] for each in inputs["deepstack_visual_embeds"]]
        return own

    def gather(self, *values_m: Tensor) -> list[Tensor]:
        """Gathers numbers per prediction from all ranks: [m] each -> [M] each, equal on all ranks.

        The gradient is that of this rank's own predictions: every rank computes the same loss from the result.
        """
        gathered: Tensor = _Gather.apply(torch.stack(values_m), self.chosen, self.predictions)  # type: ignore[no-untyped-call]
        return list(gathered)


class ContextParallelAttention:
    """AttentionContext of a rank's share of a row: `whole` computes a share of the heads for all tokens."""

    def __init__(self, whole: AttentionContext, share: ContextShare) -> None:
        self._whole, self._share = whole, share

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Exchange shares of the tokens for shares of the heads, attend, and exchange back: query [1, H, n, D], key
        [1, K, n, D], value [1, K, n, V] -> [1, n, H, V].

        Raises:
            ModelError: the ranks do not divide H.
        """
        ranks, heads, kv_heads = self._share.ranks, query.shape[1], key.shape[1]
        if heads % ranks:
            raise ModelError(f"{ranks} ranks cannot share the {heads} attention heads of a layer; use sharding: fsdp")
        repeats = math.lcm(kv_heads, ranks) // kv_heads
        if repeats > 1:  # every rank needs a key head of its own
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        sizes, parts = [], []
        for x in (query, key, value):
            by_rank = x[0].to(value.dtype).unflatten(0, (ranks, -1)).permute(0, 2, 1, 3)  # [R, n, H / R, D]
            sizes.append(by_rank.shape[2:])
            parts.append(by_rank.flatten(2))
        received = _exchange(torch.cat(parts, dim=2)).transpose(0, 1).flatten(0, 1)[: self._share.tokens]
        split = received.split([math.prod(size) for size in sizes], dim=1)
        q, k, v = (x.unflatten(1, size).transpose(0, 1)[None] for x, size in zip(split, sizes, strict=True))
        if options.sinks is not None:
            own = options.sinks.unflatten(0, (ranks, -1))[self._share.rank]
            options = AttentionOptions(options.scaling, options.sliding_window, options.chunk, options.softcap, own)
        output = self._whole.attend(q, k, v, options)[0]  # [T, H / R, V]
        missing = -self._share.tokens % ranks
        by_rank = pad(output, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, ranks)).transpose(0, 1)
        received = _exchange(by_rank)  # [R, n, H / R, V], by heads
        return received.transpose(0, 1).flatten(1, 2)[None]

    def recur(self, hidden: Tensor, call: RecurrentCall) -> Tensor:
        """Never called: `check_context_parallel` refuses models with recurrent layers."""
        raise AssertionError("a recurrent layer under context parallelism")


def _exchange(by_rank: Tensor) -> Tensor:
    """Sends part r of [R, ...] to rank r; returns what the ranks sent here, in their order."""
    received: Tensor = _AllToAll.apply(by_rank)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """All-to-all of equal parts, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor) -> Tensor:
        return _all_to_all(by_rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _all_to_all(grads[0])


def _all_to_all(by_rank: Tensor) -> Tensor:
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, chosen: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(chosen)
        gathered = own.new_zeros(own.shape[0], size).index_copy_(1, chosen, own)
        dist.all_reduce(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        return grads[0].index_select(1, chosen), None, None
