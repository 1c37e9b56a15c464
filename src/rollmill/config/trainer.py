"""`trainer`: optimizer, batch splitting, precision and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from rollmill.config.section import Section

MOMENT_BLOCK = 256
"""Values of a moment in 8 bits that share a scale."""

PLAIN_CHOICES: Mapping[str, Any] = {"param_dtype": "fp32", "gradient_checkpointing": False, "micro_batch_tokens": 8192}
"""What `auto` means on a CPU, and where nobody has chosen."""

_CHOSEN: Any = "auto"
if TYPE_CHECKING:  # from its setup on a run has plain values, see orchestrator/memory_choice.py
    AutoBool = bool
    AutoCount = int
else:
    AutoBool = bool | Literal["auto"]
    AutoCount = Annotated[int, Field(ge=1)] | Literal["auto"]


class TrainerConfig(Section):
    """Optimizer, batch splitting and distribution."""

    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, over the stage's steps."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly to lr."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of linear and cosine schedules, as a fraction of lr."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps both moments of AdamW in 8 bits a weight, in blocks with a scale of their own
    (arXiv:2110.02861) and rounded stochastically: 2 bytes a weight instead of 8, or of 4 with `param_dtype: bf16`."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon in the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm, for clipping."""
    updates_per_batch: int = Field(1, ge=1)
    """Mini-batches per pass over the batch, each of whole groups, with one optimizer step each."""
    epochs_per_batch: int = Field(1, ge=1)
    """Passes over each batch."""
    micro_batch_tokens: AutoCount = _CHOSEN
    """Tokens per forward and backward pass; the gradient does not depend on it. `auto`: 8192, and on a GPU less if a
    step does not fit otherwise."""
    metrics_share: float = Field(1.0, ge=0, le=1)
    """Share of the completions without an advantage (those of groups with equal rewards) that pass through the model.
    Nothing is learned from them: they only count in metrics such as entropy and kl, which are then estimated from a
    random sample, and have token details. Less is faster, the more so the more groups are uniform."""
    logprob_chunk: int | None = Field(None, ge=1)
    """Maximum rows of [rows, vocabulary] logits in memory at a time. Default: as many as fit in 256 MiB, at most
    1024."""
    gradient_checkpointing: AutoBool = _CHOSEN
    """Recompute activations in the backward pass: less memory, more time. `auto`: on a GPU, if a step does not fit
    otherwise."""
    freeze: list[Literal["vision", "projector"]] = ["vision"]
    """Parts of a vision-language model that are not trained: its vision tower, and the projector from the tower to the
    embeddings."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype over fp32 master weights. `auto` measures which is faster on this machine for the matrix products
    of a step of the last stage: all linear layers, with the rows of its rollouts and of its passes. It measures once:
    later runs read the times from the cache folder, and so compute the same."""
    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the weights, their gradients and AdamW's moments. `bf16` takes half the memory, and computes in bf16: for
    models that do not fit otherwise. Updates are rounded stochastically, since nearly all of them would be lost by
    rounding to nearest (arXiv:2010.06192). Adapters (model.lora) stay in fp32, over a model in bf16. `auto`: fp32, and
    on a GPU bf16 if a step does not fit otherwise."""
    ranks: int = Field(1, ge=1)
    """Number of trainer processes, each with `threads` threads or a GPU of its own. The first one is the run's own
    process, which also rolls out; on Ray it is the trainer's, and the others may be on other hosts."""
    sharding: Literal["none", "fsdp", "tensor", "context", "expert"] = "none"
    """`none`: every rank holds the whole model and optimizer. `fsdp`: each rank holds a shard of weights, gradients and
    optimizer states. `tensor`: each rank holds a shard of each layer's matrices and processes every row. `context`:
    every rank holds the whole model and processes its share of the tokens of every row, for long contexts; ranks
    exchange tokens for heads around attention (arXiv:2309.14509). `expert`, for mixtures of experts: each rank holds
    its share of the experts, to which tokens travel (arXiv:2006.16668). With shards, an engine in the first rank's
    process has a copy in its own type."""
    router_replay: bool | Literal["auto"] = "auto"
    """Mixture-of-experts models: route each token in training through the experts chosen in its rollout (R3,
    arXiv:2510.11370), so that near ties between experts do not change log-probs. `auto`: if the model has routers and
    engine `native` rolls out; `true`: required, otherwise the run is refused."""
    rank_deadline_s: float = Field(600.0, gt=0)
    """Timeout of a rank that waits for another one within a step."""

    def settled(self, values: Mapping[str, Any] = PLAIN_CHOICES) -> Self:
        """Returns a copy with these values in place of `auto`; default: those of a CPU."""
        open_keys = {key: values[key] for key in PLAIN_CHOICES if key in values and getattr(self, key) == "auto"}
        return self.model_copy(update=open_keys) if open_keys else self

    @property
    def shards_weights(self) -> bool:
        """True if ranks hold parts of the weights."""
        return self.ranks > 1 and self.sharding in ("fsdp", "tensor", "expert")

    @property
    def saves_memory(self) -> bool:
        """True if a smaller run is worth some time: then freed memory returns to the system."""
        return self.param_dtype == "bf16" or self.optimizer == "adamw_8bit"

    def unused_keys(self) -> dict[str, str]:
        keys = {"sharding", "rank_deadline_s"} if self.ranks == 1 else set()
        unused = dict.fromkeys(sorted(keys), "not honoured with one rank; give trainer.ranks or remove it")
        if self.schedule == "constant":
            unused["min_lr_ratio"] = "not honoured by schedule `constant`; it is by `linear` and `cosine`"
        return unused

    def conflicts(self) -> dict[str, str]:
        found = {}
        if not all(0 <= beta < 1 for beta in self.betas):
            found["betas"] = "both must be at least 0 and below 1, for example [0.9, 0.99]"
        if self.param_dtype == "bf16" and self.precision == "fp32":
            found["precision"] = "weights in bf16 (param_dtype) are computed with in bf16; use bf16, or remove one"
        if self.param_dtype == "bf16" and self.ranks > 1 and self.sharding != "fsdp":
            found["param_dtype"] = (
                "bf16 is supported with several ranks only by sharding `fsdp`: others add their gradients in fp32; use "
                "that, or 1 rank"
            )
        if self.optimizer == "adamw_8bit" and self.shards_weights:
            found["optimizer"] = (
                "adamw_8bit does not support shards, which would cut its blocks; use sharding `none` or `context`"
            )
        return found
