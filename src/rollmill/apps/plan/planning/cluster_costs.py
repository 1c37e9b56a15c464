"""Estimates what the parts of a step cost on GPUs of a kind: seconds from the data sheet, and bytes of each process."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch

from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.config.model import ModelConfig
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.models.gpu_kinds import GPU_KINDS, MEMORY_USABLE, GPUKind
from rollmill.models.load import PolicyModel, build_meta_policy
from rollmill.models.quantization import count_weights
from rollmill.models.storage import narrow_weights
from rollmill.offload.plan import estimate_component_sizes
from rollmill.orchestrator.memory_choice import choose_memory, settle_on_cpu
from rollmill.orchestrator.stage_memory import StageModel, StepTokens
from rollmill.trainer.step_memory import PolicySizes

GPUS_PER_NODE = 8
FLOPS_REACHED, BANDWIDTH_REACHED, NETWORK_REACHED = 0.4, 0.6, 0.7
"""Shares of the data sheets' rates that are assumed: of a trainer's or a prefill's products, of a decoding pass over
weights and keys and values, and of transfers."""
_BF16, _FP32 = 2, 4
_PASS_S = 1e-3
"""Launching the kernels of a decoding pass, sampling included."""
_SPREAD = 0.8
"""Standard deviation of the logarithm of completions' lengths."""
_GROUPS, _STEPS_DRAWN, _JITTER = 256, 16, 0.03


def gpu_kind(name: str) -> GPUKind:
    """Look up a kind by name. Raises ConfigError for an unknown one."""
    if name not in GPU_KINDS:
        raise ConfigError(f"--cluster {name}: unknown kind of GPU; choose one of {', '.join(GPU_KINDS)}")
    return GPU_KINDS[name]


@dataclass(frozen=True)
class ClusterModel:
    """Sizes of a policy and of a step, for estimates.

    `prompt` and `mean` are tokens of a prompt and of a completion.
    """

    given: StageConfig  #: as the run file has it
    stage: StageConfig  #: with plain values in its trainer
    model: Any
    prompt: int
    mean: float

    @classmethod
    def of(cls, stage: StageConfig, model: Any, prompt: int, mean: float | None) -> Self:
        """A stage with the values that a CPU has, see `fitted`. `mean` None: half of rollout.max_new_tokens."""
        mean = stage.rollout.max_new_tokens / 2 if mean is None else mean
        return cls(stage, settle_on_cpu(stage), model, prompt, mean)

    def like(self, stage: StageConfig, mean: float | None) -> Self:
        """The same policy and prompts in another stage of the run."""
        return type(self).of(stage, self.model, self.prompt, mean)

    def fitted(self, memory: float, ranks: int) -> Self:
        """The stage as the trainer chooses it on so many GPUs of its own, sharded, with explorers on others."""
        own = {"ranks": ranks, "sharding": "fsdp" if ranks > 1 else "none"}
        given = self.given.model_copy(update={"trainer": self.given.trainer.model_copy(update=own)})
        [choice] = choose_memory([given], self.model, memory, [[]])
        return replace(self, stage=choice.stage, model=choice.model)

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

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of keys and values per token, in bf16."""
        return PolicySizes.of(self.model).cache_bytes("bf16")

    @property
    def tokens(self) -> StepTokens:
        """Tokens of a step, as far as the memory of a GPU follows from them."""
        return StepTokens(self.longest, self.step_tokens)

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
    """Build the policy without weights, with its adapters, in the type of the stage's weights.

    Raises ModelError if its folder holds no model that can be trained.
    """
    model = build_meta_policy(config)
    if stage.trainer.param_dtype == "bf16":
        narrow_weights(model)
    return ClusterModel.of(stage, model, prompt, mean)


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
    own = {"ranks": ranks, "sharding": "fsdp" if ranks > 1 else "none"}
    stage = model.stage.model_copy(update={"trainer": model.stage.trainer.model_copy(update=own)})
    return StageModel(stage, model.model, "cuda", "bf16", model.tokens, explorers=[]).memory()[0]["train"].total


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


def trained_passes(stage: StageConfig, components: Collection[str]) -> int:
    """Products per weight and token of a training step: of the policy, a critic, a reference and a teacher.

    Args:
        components: names of what the stage has.
    """
    passes = (8 if stage.trainer.gradient_checkpointing else 6) * stage.trainer.epochs_per_batch
    forward = 2 * sum(name in components for name in ("reference", "critic", "teacher"))
    return passes * (2 if "critic" in components else 1) + forward
