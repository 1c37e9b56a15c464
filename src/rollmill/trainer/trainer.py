"""The trainer: turns a batch of experiences into one or more optimizer steps and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.algorithms.recipe import Recipe
from rollmill.config.trainer import TrainerConfig
from rollmill.models.cpu.host_memory import trim_heap
from rollmill.models.cpu.norms import NormReplacements, find_norms, use_fast_norms
from rollmill.models.cpu.step_timing import StepSize, choose_precision
from rollmill.models.load import PolicyModel
from rollmill.models.routing import routing_shape
from rollmill.models.vision import freeze_parts, picture_processor
from rollmill.offload import Offloadable, offload_tensors
from rollmill.trainer.coefficients import LossCoefficients
from rollmill.trainer.critic import Critic, ValueModel
from rollmill.trainer.distributed.expert_parallel import distribute_experts
from rollmill.trainer.distributed.fsdp import apply_fsdp, gather_state_dict
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.distributed.tensor_parallel import parallelize_network, tensor_parallel_plan
from rollmill.trainer.logprobs import ForwardPasses
from rollmill.trainer.loss import compute_advantages
from rollmill.trainer.metrics import TokenMetrics
from rollmill.trainer.mismatch import LogprobComparison
from rollmill.trainer.model_setup import evaluation_mode, set_gradient_checkpointing, to_master_weights
from rollmill.trainer.optimizer import (
    TensorGetter,
    build_optimizer,
    compute_learning_rate,
    load_optimizer_state_dict,
    optimizer_state_dict,
    optimizer_tensors,
)
from rollmill.trainer.precompute import Precomputer
from rollmill.trainer.prepared import PreparedBatch
from rollmill.trainer.reference import ReferenceModel
from rollmill.trainer.teacher import Teacher
from rollmill.trainer.update import PolicyUpdater, split_mini_batches
from rollmill.types import IMPORTED_FROM, Experience, ExperienceSource


class Trainer:
    """Learns from batches of experiences by a recipe, on one device.

    Old log-probs (the denominator of the ratio): with one optimizer step per batch, and either all tokens sampled with
    the current weights or old log-probs to be recomputed, they are the policy's own, detached, so the ratio is exactly
    1. Otherwise (several optimizer steps, or stale tokens) the recipe's `proximal` decides: those recorded by the
    rollout, those recomputed once before the first step, or an interpolation.

    An optimizer step in which no token has a gradient (every advantage 0, and no other term) is skipped: Adam's moments
    would move the weights without any evidence. The metric `skipped` counts them. Experiences without a gradient are
    only run forward, for the metrics.

    Args:
        model: a transformers causal LM; its weights become the fp32 master weights (with `param_dtype: bf16` they are
            bf16 already, see narrow_weights) and are changed in place.
        total_steps: training steps of the stage, for the schedule.
        reference: frozen policy for the KL term; by default the policy as it is now, if the recipe needs one.
        teacher: frozen model with the policy's vocabulary, for a recipe that distils from another model.
        ranks: data-parallel ranks; every rank calls `step` with the same batch. Default: those of torch.distributed.
        kept_versions: number of earlier versions whose weights are kept to compare log-probs.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        config: TrainerConfig,
        *,
        total_steps: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        reference: nn.Module | None = None,
        teacher: nn.Module | None = None,
        ranks: RankGroup | None = None,
        kept_versions: int = 0,
    ) -> None:
        self.device, config = torch.device(device), config.settled()
        self._ranks = ranks or RankGroup.current()
        if not self._ranks.shards_weights:
            model = model.to(self.device)
        self.model = to_master_weights(model) if config.param_dtype == "fp32" else model
        self.recipe, self.config, self.total_steps = recipe, config, total_steps
        precision = config.precision
        if precision == "auto":
            precision = choose_precision(model, device, StepSize.of_training(config.micro_batch_tokens))
        self.steps = 0
        routing = routing_shape(self.model) if config.router_replay else None
        self._passes = ForwardPasses(recipe, config, precision, self.device, self._ranks, routing)
        self._generator = torch.Generator().manual_seed(seed)
        if picture_processor(self.model) is not None:
            freeze_parts(self.model, config.freeze)
        set_gradient_checkpointing(self.model, config.gradient_checkpointing)
        self._reference = ReferenceModel(self.model, reference, self.device) if recipe.uses_reference else None
        self._teacher: Teacher | None = None
        if recipe.distill is not None:
            self._teacher = Teacher(self.model, teacher, recipe.distill, self._passes, self.device)
        self._critic: Critic | None = None
        if recipe.critic is not None:
            self._critic = Critic(self.model, recipe.critic, self._passes, total_steps)
        self.coefficients = LossCoefficients(recipe)
        self._norms: NormReplacements = find_norms(*self._models()) if self.device.type == "cpu" else []
        _shard_models(self._models(), self.model, self._ranks, self.device)
        self._optimizer = build_optimizer(self.model, config)
        self._inference = Precomputer(
            self.model, self._passes, reference=self._reference, critic=self._critic, ready=self._ready
        )
        self._updates = PolicyUpdater(self.model, self._optimizer, self._passes, self._teacher)
        self._mismatch = LogprobComparison(
            self.model, self._inference.logprobs, self._ranks, self.device, kept_versions=kept_versions
        )
        self._refreshed: int | None = None

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return self._passes.precision

    @property
    def needs_precompute(self) -> bool:
        """True if a step may need passes that `precompute` can make."""
        recipe = self.recipe
        compares = self._reference is not None or self._critic is not None
        return compares or recipe.kl_in_reward or recipe.uses_probabilities or recipe.proximal == "recompute"

    def start(self, *, keeps_policy: bool = True) -> None:
        """No-op: there are no other processes."""

    def sharded_weights(self) -> None:
        """None: the policy's model has the weights."""

    def gather_policy(self) -> None:
        """No-op: the policy's model has the weights."""

    def precompute(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """Runs the forward passes of `step` that need no rewards, one per iteration; `step` on the same batch reuses
        them.

        These are old and reference log-probs and values. There may be none.
        """
        self._refresh_reference()
        return self._inference.precompute(experiences, version, self.device)

    def set_learning_rate(self, lr: float) -> None:
        """Changes the peak learning rate from the next step on; its schedule goes on. A checkpoint does not hold it."""
        self.config = self.config.model_copy(update={"lr": lr})

    def to_compare(
        self, upcoming: Sequence[Sequence[Experience]], experiences: Sequence[Experience], version: int
    ) -> list[Experience]:
        """Selects completions of later steps to compare in `step` on `experiences`: a sample of each upcoming batch."""
        return self._mismatch.choose(upcoming, experiences, version)

    def step(
        self, experiences: Sequence[Experience], version: int, compared: Sequence[Experience] = ()
    ) -> dict[str, float]:
        """Learns from one batch; `version` is the version of the current weights.

        Sets each experience's `advantage`, `trainer_logprobs` and `entropy`.

        Returns the metrics: lr (of the last update), loss, loss/<term> and grad_norm (means over the updates), entropy,
        kl (k3 from rollout policy to current), kl_ref, ratio/mean, ratio/clip_fraction, logprob_gap/mean, /max and
        /tokens (|trainer - engine| with the weights that sampled the token), policy_drift/mean, /max and /k1 (of the
        log-prob ratio of the policy to the rollout over all rollout tokens), tokens (action tokens), updates and
        skipped; weight/<term> if it follows a schedule, kl_coefficient and entropy_coefficient if they adapt,
        ratio/masked_fraction if there are masks, value/... if there is a critic.

        Args:
            compared: result of `to_compare`.

        Raises:
            TrainingError: a loss or gradient is not finite; the weights are as before the failing update.
        """
        config = self.config
        if config.saves_memory and self.device.type == "cpu":
            trim_heap()  # what rollouts have freed would be in the way of what a step keeps
        if self.recipe.reset_optimizer:
            self._optimizer.state.clear()
        learned = self._prepare(experiences, version, compared)
        lr = self._set_learning_rate()
        metrics, totals, updates = TokenMetrics(self.recipe, self._ranks), _Totals(), 0
        extra = self.coefficients.metrics(self.steps)
        with self._ready():
            for epoch in range(config.epochs_per_batch):
                for part in split_mini_batches(
                    experiences,
                    config.updates_per_batch,
                    self._generator if epoch else None,
                    learned.advantages.domains,
                ):
                    if updates and self.recipe.proximal != "recompute":
                        learned.fresh = torch.zeros_like(learned.fresh)  # an update has been made since
                    batch = learned.mini_batch(part, self.recipe, self.coefficients, self.steps, self._generator)
                    if not self._critic_only:
                        totals.add(self._updates.make(batch, metrics, first_pass=epoch == 0))
                    if self._critic is not None:
                        totals.add(self._critic.update(batch, learned.advantages, learned.scores))
                    updates += 1
        extra |= learned.value_metrics()
        if not self._critic_only:
            learned.set_token_details(metrics.token_details(learned.tokens, self.device))
        found = metrics.result() | self._mismatch.metrics(experiences, metrics.mismatch)
        self._end_step(found, sum(e.source is ExperienceSource.ROLLOUT for e in experiences))
        skipped = totals.pop("skipped")
        counts = {"tokens": float(learned.tokens), "updates": updates - skipped, "skipped": skipped}
        return {"loss": 0.0, "grad_norm": 0.0, **totals.means(updates), **found, "lr": lr, **extra, **counts}

    def _prepare(
        self, experiences: Sequence[Experience], version: int, compared: Sequence[Experience] | None
    ) -> PreparedBatch:
        """Computes what does not change with the updates on a batch; None for `compared` compares nothing."""
        self._refresh_reference()
        table, scores = self._inference.take(experiences, version, self.device)
        if compared is not None:
            self._mismatch.compare(experiences, compared, version, fresh_as_well=self._critic_only)
        own = torch.tensor([IMPORTED_FROM not in each.info for each in experiences], device=self.device)
        fresh = (table.version == version) & own[table.experience]
        advantages = compute_advantages(experiences, table, self.recipe, scores, kl_coefficient=self.coefficients.kl)
        return PreparedBatch(experiences, version, table, scores, advantages, fresh)

    def _set_learning_rate(self) -> float:
        lr = compute_learning_rate(self.config, self.steps, self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _end_step(self, metrics: dict[str, float], rollouts: int) -> None:
        """Counts a training step; adapts coefficients to its metrics, and the teacher to its weights."""
        self.steps += 1
        if self._teacher is not None:
            self._teacher.follow()
        self.coefficients.update(metrics, rollouts)

    def offloadable(self, folder: Path) -> list[Offloadable]:
        """Returns the components held in memory between steps, by the names of `offload`; `folder` is for files."""
        found: dict[str, TensorGetter] = {
            "policy": self.model.parameters,
            "optimizer": partial(optimizer_tensors, self._optimizer),
        }
        if self._reference is not None and self._reference.model is not None:
            found["reference"] = self._reference.model.parameters
        if self._teacher is not None and self._teacher.own_model is not None:
            found["teacher"] = self._teacher.own_model.parameters
        found |= {} if self._critic is None else self._critic.offloadable_tensors()
        return [offload_tensors(name, tensors, folder, self.device.type) for name, tensors in found.items()]

    def state_dict(self, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Any]:
        """Returns the state to resume from, besides the model's weights: whole tensors, the same for any number of
        ranks. With shards all ranks call this together, and rank 0 gets the result, and keeps its tensors by `keep`."""
        state: dict[str, Any] = {
            "optimizer": optimizer_state_dict(self._optimizer, self.model, keep),
            "steps": self.steps,
            "generator": self._generator.get_state(),
            "precision": self.precision,
            "reference": None if self._reference is None else self._reference.state_dict(),
            "teacher": None if self._teacher is None else self._teacher.state_dict(),
            "critic": None if self._critic is None else self._critic.state_dict(keep),
            "mismatch": self._mismatch.state_dict(),
            **self.coefficients.state_dict(),
        }
        return dict(gather_state_dict(state, keep))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_optimizer_state_dict(self._optimizer, self.model, state["optimizer"])
        self.steps, self._passes.precision = state["steps"], state["precision"]
        self._generator.set_state(state["generator"])
        if self._reference is not None:
            self._reference.load_state_dict(state["reference"])
        if self._teacher is not None:
            self._teacher.load_state_dict(state["teacher"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])
        self.coefficients.load_state_dict(state)
        self._mismatch.load_state_dict(state["mismatch"])

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Prepares the models for a pass: dropout off, fast norms."""
        critic = nullcontext() if self._critic is None else evaluation_mode(self._critic.model)
        with evaluation_mode(self.model), critic, use_fast_norms(self._norms):
            yield

    def _refresh_reference(self) -> None:
        """Replaces the reference with the current policy, once every N steps."""
        refresh = self.recipe.kl.refresh_every
        if self._reference is not None and refresh and self.steps % refresh == 0 and self._refreshed != self.steps:
            self._reference.refresh()
            self._refreshed = self.steps

    @property
    def _critic_only(self) -> bool:
        return self._critic is not None and self.steps < self._critic.options.warmup_steps

    def _models(self) -> list[Any]:
        """Policy, reference and critic, as far as they exist."""
        critic = None if self._critic is None else self._critic.model
        reference = None if self._reference is None else self._reference.model
        return [model for model in (self.model, reference, critic) if model is not None]

    def export(self, folder: Path, policy: PolicyModel) -> None:
        """No-op: only the policy is trained."""

    def close(self) -> None:
        """No-op: there are no other processes."""


class _Totals:
    """Sums the metrics of the updates."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def pop(self, name: str) -> float:
        return self._sums.pop(name, 0.0)

    def means(self, updates: int) -> dict[str, float]:
        return {name: value / max(updates, 1) for name, value in self._sums.items()}


def _shard_models(models: Sequence[Any], policy: nn.Module, ranks: RankGroup, device: torch.device) -> None:
    """Distributes the weights of policy, reference and critic over the ranks, where these are sharded."""
    if ranks.sharding == "fsdp":
        for model in models:
            apply_fsdp(model, device)
    elif ranks.sharding == "expert":
        for model in models:
            distribute_experts(model, device)
    elif ranks.sharding == "tensor":
        styles = tensor_parallel_plan(policy, ranks.size)
        for model in models:
            network = model.network if isinstance(model, ValueModel) else model.base_model
            parallelize_network(model, network, styles, device)
