"""Log-probs and entropies of chosen tokens, computed in chunks so that [tokens, vocabulary] never exists at once.

`compute_logprobs` works on a micro-batch, `token_logprobs` on hidden states, and `ForwardPasses` on the batches of a
stage. `compute_vocabulary_sums` sums over whole next-token distributions.

Shapes: T tokens of the row, M predictions, C rows of a chunk, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import rollmill.models.experts  # noqa: F401  registers how experts are multiplied
from rollmill.algorithms.recipe import Recipe
from rollmill.config.trainer import TrainerConfig
from rollmill.models.attention import base_network, build_forward_inputs, use_attention_context
from rollmill.models.routing import replay_routing
from rollmill.models.vision import build_picture_inputs, compute_features, final_softcap, picture_processor, text_model
from rollmill.progress import Progress, count_progress
from rollmill.trainer.batch import MicroBatch, TokenTable, build_micro_batches
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.types import Experience

CHUNK_LOGITS = 1 << 26  #: default number of logits that exist at a time


def compute_logprobs(
    model: Any,
    micro: MicroBatch,
    table: TokenTable,
    *,
    hidden_Td: Tensor | None = None,
    chunk: int | None = None,
    entropy_gradient: bool = False,
    bf16: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (nats) of a micro-batch's action tokens at their rollout temperatures: float32 [M] each.

    Args:
        hidden_Td: result of `compute_hidden_states`, if already computed.
        chunk: rows of logits that exist at a time; None: as many as take 256 MiB in float32, at most 1024.
        entropy_gradient: make the entropy differentiable.
        bf16: compute in bfloat16 (logits are cast to float32 before any sum).
    """
    if hidden_Td is None:
        hidden_Td = compute_hidden_states(model, micro, bf16=bf16)
    head = model.get_output_embeddings()
    tokens = micro.own(micro.tokens)
    logprob, entropy = token_logprobs(
        hidden_Td,
        micro.own_rows,
        head.weight,
        head.bias,
        table.target[tokens],
        table.temperature[tokens],
        chunk=chunk,
        softcap=final_softcap(model),
        scale=_logit_scale(model.config),
        entropy_gradient=entropy_gradient,
        dtype=torch.bfloat16 if bf16 else None,
        tempered=table.tempered,
    )
    logprob, entropy = micro.gather(logprob, entropy)
    return logprob, entropy if entropy_gradient else entropy.detach()


def compute_hidden_states(model: Any, micro: MicroBatch, *, bf16: bool = False) -> Tensor:
    """Last hidden states of a micro-batch's row, [T, d]; with context parallelism those of this rank's tokens."""
    device = micro.input_ids.device.type
    with torch.autocast(device, torch.bfloat16, cache_enabled=_keeps_casts(model, device)) if bf16 else nullcontext():
        sees = picture_processor(model) is not None
        network = text_model(model) if sees else base_network(model)
        share, tokens, positions = micro.share, micro.input_ids, micro.position_ids
        if share is not None and not micro.pictures:
            tokens, positions = share.take(tokens, 1), share.take(positions, 1)
        inputs = build_forward_inputs(network, tokens, positions)
        if micro.pictures or micro.tower_passes:
            prompts = {span.prompt.key: span.prompt for span in micro.pictures}
            features = compute_features(model, prompts.values(), micro.tower_passes)
            inputs = build_picture_inputs(model, inputs, micro.pictures, features)
            inputs = inputs if share is None else share.take_inputs(inputs)
        output = network(**inputs)
    hidden_Td: Tensor = output.last_hidden_state[0]
    return hidden_Td


def _keeps_casts(model: Any, device: str) -> bool:
    """True if autocast keeps the casts of all weights during a pass: of use for a backward pass, and for layers that a
    model runs several times. On a GPU they are not worth half of the weights' memory."""
    if device == "cpu":
        return True
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return torch.is_grad_enabled() and not recomputes


def compute_logits(model: Any, hidden_Cd: Tensor) -> Tensor:
    """Logits of the model [C, V], float32 (float64 for float64 models), by plain differentiable operations."""
    head = model.get_output_embeddings()
    logits = linear(hidden_Cd.to(head.weight.dtype), head.weight, head.bias) * _logit_scale(model.config)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    softcap = final_softcap(model)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@contextmanager
def use_packed_attention(model: Any, micro: MicroBatch, *, replay: bool = False) -> Iterator[None]:
    """Context in which `compute_logprobs` and its backward pass must run.

    Args:
        replay: use the experts that the rollout chose, where known. For the policy only.
    """
    routing = micro.routing if replay else None
    if routing is not None and micro.share is not None:
        routing = micro.share.take(routing, 0, fill=-1)
    replaying = nullcontext() if routing is None else replay_routing(model, routing)
    with use_attention_context(text_model(model), micro.attention), replaying:
        yield


def token_logprobs(
    hidden_Td: Tensor,
    rows_M: Tensor,
    weight_Vd: Tensor,
    bias_V: Tensor | None,
    target_M: Tensor,
    temperature_M: Tensor,
    *,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    entropy_gradient: bool = False,
    dtype: torch.dtype | None = None,
    tempered: bool = True,
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature)[target] and the entropy of that distribution, for chosen rows.

    logits = scale * (hidden W^T + bias), then softcap * tanh(logits / softcap). Sums over the vocabulary use float32
    (float64 for float64 inputs). Gradients flow into hidden states, weight and bias; backward recomputes the logits
    chunk by chunk, unless there was only one chunk. For `chunk` see `compute_logprobs`.

    Args:
        tempered: some temperature is not 1.

    Returns:
        log-probs [M] and entropies [M].
    """
    chunk = chunk or max(1, min(1024, CHUNK_LOGITS // weight_Vd.shape[0]))
    options = _Options(chunk, softcap, scale, entropy_gradient, dtype or hidden_Td.dtype, tempered)
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_Td, rows_M, weight_Vd, bias_V, target_M, temperature_M, options
    )
    return result


class _Options:
    def __init__(
        self,
        chunk: int,
        softcap: float | None,
        scale: float,
        entropy_gradient: bool,
        dtype: torch.dtype,
        tempered: bool,
    ) -> None:
        self.chunk, self.softcap, self.scale = chunk, softcap, scale
        self.entropy_gradient, self.dtype, self.tempered = entropy_gradient, dtype, tempered


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        picked = hidden.index_select(0, rows).to(options.dtype)
        cast = weight.to(options.dtype)
        logprobs, entropies, kept = [], [], None
        for a in range(0, max(len(rows), 1), options.chunk):
            b = min(a + options.chunk, len(rows))
            log_p = _log_softmax(picked[a:b], cast, bias, temperature[a:b], options)[0]
            logprobs.append(log_p.gather(1, target[a:b, None])[:, 0])
            p = log_p.exp()
            entropies.append(-torch.linalg.vecdot(p, log_p))
            if len(rows) <= options.chunk and options.softcap is None:
                kept = p
            del log_p, p  # before the next chunk is allocated
        entropy = torch.cat(entropies)
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, rows, weight, bias, target, temperature, entropy, kept)
        ctx.options = options
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, rows, weight, bias, target, temperature, entropy, kept = ctx.saved_tensors
        options: _Options = ctx.options
        picked = hidden.index_select(0, rows).to(options.dtype)
        cast = weight.to(options.dtype)
        scaled = options.scale != 1.0 or options.tempered
        grad_picked = torch.empty_like(picked)
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for a in range(0, max(len(rows), 1), options.chunk):
            b = min(a + options.chunk, len(rows))
            slope, log_p = None, None
            if kept is None:
                log_p, slope = _log_softmax(picked[a:b], cast, bias, temperature[a:b], options)
                p = log_p.exp() if options.entropy_gradient else log_p.exp_()
            else:
                p = kept
            g = _logit_gradient(p, log_p, grads[0][a:b], grads[1][a:b], entropy[a:b], target[a:b], options)
            del p, log_p
            if scaled:
                g.div_((temperature[a:b] / options.scale)[:, None])
            if slope is not None:
                g.mul_(slope)
            if bias is not None:
                grad_bias = g.sum(0) if grad_bias is None else grad_bias.add_(g.sum(0))
            g = g.to(options.dtype)
            torch.mm(g, cast, out=grad_picked[a:b])
            if ctx.needs_input_grad[2]:
                grad_weight = _accumulate_product(grad_weight, g, picked[a:b], weight.dtype)
            del g, slope
        grad_hidden = torch.zeros_like(hidden).index_add_(0, rows, grad_picked.to(hidden.dtype))
        return grad_hidden, None, grad_weight, grad_bias, None, None, None


def _accumulate_product(total_Vd: Tensor | None, g_CV: Tensor, hidden_Cd: Tensor, dtype: torch.dtype) -> Tensor:
    """total + g^T hidden, in `dtype`, without a second [V, d] tensor where the types allow it."""
    if total_Vd is None:
        return torch.mm(g_CV.t(), hidden_Cd).to(dtype)
    if g_CV.dtype == dtype:
        return total_Vd.addmm_(g_CV.t(), hidden_Cd)
    return total_Vd.add_(torch.mm(g_CV.t(), hidden_Cd))


def _log_softmax(
    hidden_Cd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, temperature_C: Tensor, options: _Options
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [C, V] and, with a softcap, its slope d capped / d logit [C, V]."""
    logits = linear(hidden_Cd, weight_Vd, None if bias_V is None else bias_V.to(weight_Vd.dtype))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if options.scale != 1.0:
        logits.mul_(options.scale)
    slope = None
    if options.softcap is not None:
        tanh = logits.div_(options.softcap).tanh_()
        slope = 1 - tanh * tanh
        logits = tanh * options.softcap
    if options.tempered:
        logits.div_(temperature_C[:, None])
    return torch.log_softmax(logits, dim=-1), slope


def _logit_gradient(
    p: Tensor,
    log_p: Tensor | None,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    entropy: Tensor,
    target: Tensor,
    options: _Options,
) -> Tensor:
    """d loss / d (logits / temperature) [C, V]: g_lp (onehot - p) - g_H p (log p + H)."""
    if options.entropy_gradient:
        log_p = p.log().clamp_(min=torch.finfo(p.dtype).min) if log_p is None else log_p
        factor = (log_p + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprob[:, None])
        gradient = factor.mul_(p)
    else:
        gradient = p.mul_(-grad_logprob[:, None])
    return gradient.scatter_add_(1, target[:, None], grad_logprob[:, None])


def _logit_scale(config: Any) -> float:
    """Factor that some model families apply to their logits, by the config names of Cohere, Falcon-H1 and Granite."""
    scale: float = (getattr(config, "logit_scale", None) or 1.0) * (getattr(config, "lm_head_multiplier", None) or 1.0)
    scaling: float = getattr(config, "logits_scaling", None) or 1.0
    return scale * scaling if config.model_type == "hyperclovax" else scale / scaling  # other families divide by it


@dataclass
class ForwardPasses:
    """Runs forward passes over chosen experiences of a batch, as configured by the recipe and the section `trainer`.

    `precision` is fp32 or bf16; a resumed run takes it from the checkpoint.
    """

    recipe: Recipe
    config: TrainerConfig
    precision: str
    device: torch.device
    ranks: RankGroup
    routing: tuple[int, int] | None = None  #: (routers, experts per token) for router replay

    def rows(self, experiences: Sequence[Experience], table: TokenTable, chosen: list[int]) -> list[MicroBatch]:
        """Packs the chosen experiences and returns this rank's micro-batches, or its shares of all."""
        return self.shared(
            build_micro_batches(
                experiences,
                table,
                chosen,
                self.config.micro_batch_tokens,
                self.device,
                keep_groups=self.recipe.keep_groups_together,
                ranks=self.ranks.shares,
                rank=self.ranks.share,
                even=self.ranks.even,
                routing=self.routing,
            )
        )

    def shared(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        """Returns this rank's share of each row; the rows themselves if ranks do not share their tokens."""
        ranks = self.ranks
        return [row.shared(ranks.rank, ranks.size) for row in rows] if ranks.sharding == "context" else rows

    def hidden(self, model: nn.Module, micro: MicroBatch) -> Tensor:
        """Last hidden states of a row (compute_hidden_states); call it inside `use_packed_attention`."""
        count_progress(Progress.MICRO_BATCHES)
        return compute_hidden_states(model, micro, bf16=self.precision == "bf16")

    def predict(
        self, model: nn.Module, micro: MicroBatch, table: TokenTable, hidden_Td: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a row's action tokens, [M] each; call it inside `use_packed_attention`."""
        return compute_logprobs(
            model,
            micro,
            table,
            hidden_Td=hidden_Td,
            chunk=self.config.logprob_chunk,
            entropy_gradient=self.recipe.uses_entropy,
            bf16=self.precision == "bf16",
        )


class VocabularySums(NamedTuple):
    """Sums over the vocabulary for each prediction, [M] each, without gradient."""

    collision: Tensor  #: sum_v p_v^2
    expected_discriminant: Tensor  #: sum_v p_v^2 (H + log p_v)


@torch.no_grad()
def compute_vocabulary_sums(
    model: Any, hidden_Td: Tensor, micro: MicroBatch, table: TokenTable, *, chunk: int | None = None
) -> VocabularySums:
    """Computes sums over the vocabulary for a micro-batch's action tokens, at their rollout temperatures.

    Args:
        hidden_Td: last hidden states, of `compute_hidden_states`.
        chunk: rows of logits that exist at a time; None: as many as take 256 MiB in float32, at most 1024.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    step = chunk or max(1, min(1024, CHUNK_LOGITS // vocabulary))
    temperature_m = table.temperature[micro.own(micro.tokens)]
    collision, discriminant = [], []
    for rows, temperature in zip(micro.own_rows.split(step), temperature_m.split(step), strict=True):
        logits_CV = compute_logits(model, hidden_Td.index_select(0, rows))
        log_p = torch.log_softmax(logits_CV / temperature[:, None], -1)
        p = log_p.exp()
        squares = torch.linalg.vecdot(p, p)
        entropy = -torch.linalg.vecdot(p, log_p)
        collision.append(squares)
        discriminant.append(entropy * squares + torch.linalg.vecdot(p * p, log_p))
    return VocabularySums(*micro.gather(torch.cat(collision), torch.cat(discriminant)))
