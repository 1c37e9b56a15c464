"""`trainer`: optimizer, precision and memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.section import Section


class TrainerConfig(Section):
    """The optimizer and how a batch is cut."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate of AdamW at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the stage's steps."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly to lr."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine schedules end, as a share of lr."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term in the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger Euclidean norm are scaled down to it."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per batch: the batch is cut into that many parts, group by group."""
    epochs_per_batch: int = Field(1, ge=1)
    """How often a batch is learned from."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens per forward and backward pass; the gradient does not depend on it."""
    logprob_chunk: int | None = Field(None, ge=1)
    """Rows of [rows, vocabulary] logits that exist at a time. Default: as many as take 256 MiB, at most 1024."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute type over fp32 master weights; auto measures which is faster on this machine."""
    ranks: int = Field(1, ge=1)
    """Processes that share the passes over a batch, each with `threads` threads or a GPU of its own. The first one is
    the run's own process, which also rolls out; on Ray it is the trainer's, and the others may be on other hosts."""
    sharding: Literal["none", "fsdp", "tensor"] = "none"
    """`none`: every rank holds the whole model and optimizer. `fsdp`: its share of weights, gradients and optimizer
    states. `tensor`: its share of each layer's matrices, with which it works on every row. With both the first rank
    holds the whole weights, too, for rollouts."""
    router_replay: bool | Literal["auto"] = "auto"
    """Mixtures of experts: train each token through the experts that its rollout chose (R3, arXiv:2510.11370), so that
    close scores of two experts do not make log-probs jump. `auto`: where the model has routers and engine `native`
    rolls out; `true`: or the run is refused."""
    rank_deadline_s: float = Field(600.0, gt=0)
    """Longest wait of a rank for another one within a step."""
