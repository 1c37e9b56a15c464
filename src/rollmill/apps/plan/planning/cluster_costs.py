"""Estimates what the parts of a step cost on GPUs of a kind: seconds from the data sheet, and bytes of each process."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rollmill.apps.plan.planning.gpus import (
    BANDWIDTH_REACHED,
    FLOPS_REACHED,
    GPUS_PER_NODE,
    MEMORY_USABLE,
    NETWORK_REACHED,
    GPUKind,
)
from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.config.hub import fetch_config, parse_reference
from rollmill.config.model import ModelConfig, NewModelConfig
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.models.from_scratch import build_new_meta_model
from rollmill.models.load import PolicyModel, build_meta_model
from rollmill.models.lora import add_lora
from rollmill.models.quantization import count_weights, quantize_linears
from rollmill.models.storage import narrow_weights
from rollmill.offload.plan import estimate_component_sizes
from rollmill.trainer.logprobs import CHUNK_LOGITS

_BF16, _FP32 = 2, 4
_PASS_S = 1e-3
"""Launching the kernels of a decoding pass, sampling included."""
_ACTIVATIONS = 34
"""Bytes of activations of a layer per token and unit of width, in bf16 (Korthikanti et al., arXiv:2205.05198)."""
_OUTPUTS = 4.5
"""Bytes of activations of a layer per token and output of its linear layers, in bf16: results, norms of them, and
inputs of norms, as measured. Of models with wide heads or feed-forward layers that is more than the above."""
_LOGIT = 10
"""Bytes of a logit of a chunk: logits in bf16, log-probs and probabilities."""
_SPREAD = 0.8
"""Standard deviation of the logarithm of completions' lengths."""
_GROUPS, _STEPS_DRAWN, _JITTER = 256, 16, 0.03


@dataclass(frozen=True)
class ClusterModel:
    """Sizes of a policy and of a step, for estimates.

    `prompt` and `mean` are tokens of a prompt and of a completion.
    """

    stage: StageConfig
    model: Any
    prompt: int
    mean: float

    @classmethod
    def like(cls, other: ClusterModel, stage: StageConfig, mean: float | None) -> ClusterModel:
        """The same policy and prompts in another stage of the run."""
        return cls(stage, other.model, other.prompt, stage.rollout.max_new_tokens / 2 if mean is None else mean)

    @cached_property
    def parameters(self) -> int:
        return count_weights(self.model)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.stage.rollout.max_new_tokens

    @property
    def step_tokens(self) -> float:
        """Tokens of a step in the trainer's rows; a prompt counts once per group."""
        rollout = self.stage.rollout
        return rollout.batch * (self.prompt + rollout.group_size * self.mean)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values per token."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * width * _BF16)

    def linears(self) -> list[tuple[str, nn.Linear]]:
        """Linear layers but the output layer and adapters, by name."""
        head = self.model.get_output_embeddings()
        return [
            (name, each)
            for name, each in self.model.named_modules()
            if isinstance(each, nn.Linear) and each is not head and "lora_" not in name
        ]

    def lengths(self, seed: int) -> list[list[int]]:
        """Draw the lengths of groups: log-normal around the mean, at most max_new_tokens."""
        draw, rollout = random.Random(seed), self.stage.rollout
        middle = math.log(self.mean) - _SPREAD**2 / 2
        return [
            [
                max(1, min(rollout.max_new_tokens, round(draw.lognormvariate(middle, _SPREAD))))
                for _ in range(rollout.group_size)
            ]
            for _ in range(_GROUPS)
        ]


def read_cluster_model(config: ModelConfig, stage: StageConfig, prompt: int, mean: float | None) -> ClusterModel:
    """Build the policy without weights, with its adapters. Raises ModelError if its folder holds no causal language
    model."""
    if config.path == "new":
        model = build_new_meta_model(config.new or NewModelConfig())
    else:
        reference = parse_reference(str(config.path))
        folder = config.path if reference is None else fetch_config(reference)
        model = build_meta_model(folder, trust=config.trust_remote_code, weights=reference is None)
    if stage.trainer.param_dtype == "bf16":
        narrow_weights(model)
    else:
        model.float()
    if config.quantization is not None:
        quantize_linears(model, config.quantization)
    if config.lora is not None:
        with torch.device("meta"):
            add_lora(model, config.lora, seed=0)
    return ClusterModel(stage, model, prompt, stage.rollout.max_new_tokens / 2 if mean is None else mean)


@dataclass(frozen=True, slots=True)
class ExplorerCosts:
    """An explorer on `gpus` GPUs: completions that fit at a time, and bytes of each GPU."""

    gpus: int
    max_sequences: int
    memory: float


def smallest_explorer(model: ClusterModel, kind: GPUKind, *, sequences: int) -> ExplorerCosts:
    """Choose the fewest GPUs that hold the weights and `sequences` completions, or at least a group of them.

    Raises ConfigError if a node is too small for one group.
    """
    weights, each = _BF16 * model.parameters, model.cache_bytes * model.longest
    wanted = min(sequences, model.stage.rollout.max_sequences)
    found: ExplorerCosts | None = None
    for gpus in (1, 2, 4, GPUS_PER_NODE):
        room = MEMORY_USABLE * kind.memory * gpus - weights
        fit = min(wanted, int(room // each)) if room > 0 else 0
        if fit >= min(model.stage.rollout.group_size, wanted):
            found = ExplorerCosts(gpus, fit, (weights + fit * each) / gpus)
        if fit == wanted or (found is not None and fit >= wanted / 2):
            break
    if found is None:
        raise ConfigError(
            f"a node of {GPUS_PER_NODE} such GPUs has no room for the weights ({weights / 1e9:.3g} GB) and one group "
            f"of completions ({wanted} of {each / 1e9:.3g} GB); lower rollout.max_new_tokens, or choose larger GPUs"
        )
    return found


def trainer_memory(model: ClusterModel, ranks: int) -> float:
    """Bytes of each rank of a trainer with `trainer.sharding: fsdp`."""
    policy: Any = PolicyModel(model.model, None, frozenset(), 0, 0, torch.device("cpu"))
    sizes = estimate_component_sizes(model.stage, policy, "bf16")
    sharded = sum(size for name, size in sizes.items() if name not in ("cast", "cache", "rewards"))
    tokens = min(model.stage.trainer.micro_batch_tokens, model.step_tokens / ranks)
    gathered = 2 * _BF16 * model.parameters / model.model.config.num_hidden_layers
    return float(sharded / ranks + activation_bytes(model, tokens) + gathered)


def activation_bytes(model: ClusterModel, tokens: float) -> float:
    """Bytes of the activations, logits and temporary gradients of a micro-batch in bf16."""
    config, trainer = model.model.config, model.stage.trainer
    head = model.model.get_output_embeddings().weight
    outputs = sum(each.out_features for _, each in model.linears()) / config.num_hidden_layers
    layer = max(_ACTIVATIONS * config.hidden_size, _OUTPUTS * outputs)
    layers = 1 if trainer.gradient_checkpointing else config.num_hidden_layers
    kept = _BF16 * config.hidden_size * config.num_hidden_layers if trainer.gradient_checkpointing else 0
    vocabulary = len(head)
    rows = min(tokens, trainer.logprob_chunk or min(1024, CHUNK_LOGITS // vocabulary))
    added = head.nbytes if head.requires_grad else 0  # a micro-batch's gradient of the head, before it is added
    return float(tokens * (layer * layers + kept) + rows * vocabulary * _LOGIT + added)


def autocast_bytes(model: ClusterModel) -> float:
    """Bytes of the copies in bf16 that autocast makes of weights in fp32, and keeps until the backward pass."""
    head = model.model.get_output_embeddings().weight
    weights = [head, *(each.weight for _, each in model.linears())]
    return float(sum(_BF16 * each.numel() for each in weights if each.dtype == torch.float32))


def cluster_costs(
    model: ClusterModel, kind: GPUKind, explorer: ExplorerCosts, ranks: int, seed: int
) -> SimulationCosts:
    """Estimate the costs of a trainer with `ranks` GPUs and of explorers."""
    weights = _BF16 * model.parameters
    flops, read = (explorer.gpus * rate for rate in (FLOPS_REACHED * kind.flops, BANDWIDTH_REACHED * kind.bandwidth))
    token_s, context = 2 * model.parameters / flops, model.prompt + model.mean / 2
    train_s = training_s(model, kind, ranks)
    draw = random.Random(seed)
    return SimulationCosts(
        groups=model.lengths(seed),
        train_s=[train_s * draw.lognormvariate(0.0, _JITTER) for _ in range(_STEPS_DRAWN)],
        pass_s=_PASS_S + weights / read,
        row_s=model.cache_bytes * context / read + token_s,
        group_s=token_s * model.prompt,
        judge_s=0.0,
        publish_s=weights / (NETWORK_REACHED * kind.network),
        receive_s=weights / (explorer.gpus * NETWORK_REACHED * kind.network),
        recompute_s=token_s * context,
    )


def training_s(model: ClusterModel, kind: GPUKind, ranks: int) -> float:
    """Seconds of a training step: products or transfers of weights and gradients, whichever takes longer."""
    trainer, tokens = model.stage.trainer, model.step_tokens
    policy: Any = PolicyModel(model.model, None, frozenset(), 0, 0, torch.device("cpu"))
    sizes = estimate_component_sizes(model.stage, policy, "bf16")
    passes = trained_passes(model.stage, sizes)
    products = passes * model.parameters * tokens / (ranks * FLOPS_REACHED * kind.flops)
    micro_batches = trainer.epochs_per_batch * math.ceil(tokens / (ranks * trainer.micro_batch_tokens))
    link = NETWORK_REACHED * (kind.node_link if ranks <= GPUS_PER_NODE else kind.network)
    transfers = 3 * _BF16 * model.parameters * micro_batches / link * (ranks - 1) / ranks
    optimizer = 4 * _FP32 * model.parameters / (ranks * BANDWIDTH_REACHED * kind.bandwidth)
    return max(products, transfers) + optimizer * trainer.epochs_per_batch * trainer.updates_per_batch


def trained_passes(stage: StageConfig, sizes: dict[str, int]) -> int:
    """Products per weight and token of a training step: of the policy, a critic, a reference and a teacher.

    Args:
        sizes: bytes of the stage's components by name.
    """
    passes = (8 if stage.trainer.gradient_checkpointing else 6) * stage.trainer.epochs_per_batch
    forward = 2 * sum(name in sizes for name in ("reference", "critic", "teacher"))
    return passes * (2 if "critic" in sizes else 1) + forward
