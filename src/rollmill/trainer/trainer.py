"""The trainer: one batch of experiences in, one or more optimizer steps, metrics out."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rollmill.algorithms.recipe import Recipe
from rollmill.config.trainer import TrainerConfig
from rollmill.core.errors import TrainingError
from rollmill.core.types import Experience, Source
from rollmill.models.norms import Replacements, find_norms, replaced
from rollmill.trainer.batch import MicroBatch, TokenTable, micro_batches, token_table
from rollmill.trainer.calibrate import choose_precision
from rollmill.trainer.logprobs import attending_to, predict
from rollmill.trainer.metrics import TokenMetrics
from rollmill.trainer.objective import Objective, Scores, judge
from rollmill.trainer.optimizer import build_optimizer, clip, gradient_norm, gradients
from rollmill.trainer.parts import cut
from rollmill.trainer.schedule import learning_rate


class Trainer:
    """Learns from batches of experiences by a recipe, on one device.

    Old log-probs (the policy a ratio is taken to): with one optimizer step per batch, and either all tokens made by the
    current weights or `importance_cap` set, they are the policy's own, detached, so the ratio is exactly 1. Otherwise
    (several optimizer steps, or stale tokens) they are the log-probs the rollout recorded; with `importance_cap` they
    are instead recomputed once before the first step, and the recipe weights tokens by min(exp(old - rollout), cap).

    An optimizer step in which no token has a gradient (every advantage 0, and no other term) is skipped: the moments of
    Adam would move the weights without any evidence. The metric `skipped` counts them. Experiences without a gradient
    are only run forward, for the metrics.

    Args:
        model: a transformers causal LM; its weights become the fp32 master weights and are changed in place.
        total_steps: training steps of the stage, for the schedule.
        reference: frozen initial policy for the KL term; by default a copy of `model` is made if the recipe needs one.
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
    ) -> None:
        self.device = torch.device(device)
        self.model = _master(model.to(self.device))
        self.recipe, self.config, self.total_steps = recipe, config, total_steps
        self.precision = choose_precision(model, device) if config.precision == "auto" else config.precision
        self.steps = 0
        self._optimizer = build_optimizer(self.model, config)
        self._generator = torch.Generator().manual_seed(seed)
        self._own_reference = recipe.uses_reference and reference is None
        if self._own_reference:
            reference = copy.deepcopy(self.model)
        self._reference: nn.Module | None = None
        if recipe.uses_reference and reference is not None:
            self._reference = reference.to(self.device).requires_grad_(False).eval()
        self._norms = self._find_norms()
        _checkpoint_activations(self.model, config.gradient_checkpointing)

    def step(self, experiences: Sequence[Experience], version: int) -> dict[str, float]:
        """Learn from one batch; `version` is the version of the weights as they are now.

        Sets each experience's `advantage`. Returns the metrics: loss, loss/<term>, grad_norm and lr (of the last update
        where they differ: lr; means over the updates: the others), entropy, kl (k3 from rollout policy to current),
        kl_ref, ratio/mean, ratio/clip_fraction, logprob_gap/mean and /max (|trainer - rollout| over tokens made by the
        current weights), tokens (action tokens), updates and skipped.

        Raises:
            TrainingError: a loss or gradient is not finite; the weights are as before the failing update.
        """
        config, table = self.config, token_table(experiences, self.device)
        judgement = judge(experiences, table, self.recipe)
        lr = learning_rate(config, self.steps, self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        metrics = TokenMetrics(self.recipe)
        totals: dict[str, float] = {"loss": 0.0, "grad_norm": 0.0, "skipped": 0.0}
        updates = 0
        with _evaluation_mode(self.model), replaced(self._norms):
            scores = self._scores(experiences, table, version)
            for epoch in range(config.epochs_per_batch):
                for part in cut(experiences, config.updates_per_batch, self._generator if epoch else None):
                    batch = _Part(experiences, table, Objective(self.recipe, table, judgement, scores, part), part)
                    for name, value in self._update(batch, metrics, version, first_pass=epoch == 0).items():
                        totals[name] = totals.get(name, 0.0) + value
                    updates += 1
        self.steps += 1
        skipped = totals.pop("skipped")
        means = {name: value / max(updates, 1) for name, value in totals.items()}
        counts = {"tokens": float(len(table.target)), "updates": updates - skipped, "skipped": skipped}
        return {**means, **metrics.result(), "lr": lr, **counts}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed trainer needs besides the model's weights."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "generator": self._generator.get_state(),
            "precision": self.precision,
            "reference": self._reference.state_dict() if self._own_reference and self._reference else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.precision = state["steps"], state["precision"]
        self._generator.set_state(state["generator"])
        self._norms = self._find_norms()
        if self._own_reference and self._reference is not None:
            self._reference.load_state_dict(state["reference"])

    def _find_norms(self) -> Replacements:
        if self.device.type != "cpu":
            return []
        return find_norms(*(model for model in (self.model, self._reference) if model is not None))

    def _update(self, batch: _Part, metrics: TokenMetrics, version: int, *, first_pass: bool) -> dict[str, float]:
        """One optimizer step over a part of the batch."""
        learned = set(batch.objective.learned)
        if first_pass:
            silent = [i for i in batch.chosen if i not in learned and batch.experiences[i].source is Source.USUAL]
            with torch.no_grad():
                for micro in self._micro_batches(batch, silent):
                    self._forward(batch, micro, metrics, version, first_pass=True)
        if not learned:
            return {"skipped": 1.0}
        self._optimizer.zero_grad(set_to_none=True)
        micros = self._micro_batches(batch, batch.objective.learned)
        totals = {"loss": 0.0}
        for micro in micros:
            with attending_to(self.model, micro):
                terms = self._forward(batch, micro, metrics, version, first_pass=first_pass)
                self._check_loss(batch, micro, terms)
                loss = _total(terms)
                loss.backward()
            totals["loss"] += loss.item()
            for name, (_, value) in terms.items():
                totals[f"loss/{name}"] = totals.get(f"loss/{name}", 0.0) + value.item()
        grads = gradients(self._optimizer)
        norm = gradient_norm(grads)
        if not math.isfinite(norm):
            self._blame_gradient(batch, micros)
        clip(grads, norm, self.config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {**totals, "grad_norm": norm}

    def _forward(
        self, batch: _Part, micro: MicroBatch, metrics: TokenMetrics | None, version: int, *, first_pass: bool
    ) -> dict[str, tuple[float, Tensor]]:
        """Weight and share of every loss term of one micro-batch."""
        with attending_to(self.model, micro):
            logprob, entropy = self._predict(self.model, micro, batch.table)
        terms: dict[str, tuple[float, Tensor]] = {}
        for source in Source:
            inputs, tokens = batch.objective.inputs(micro, logprob, entropy, source)
            if not len(tokens):
                continue
            terms |= batch.objective.terms(inputs, tokens, source)
            if metrics is not None and source is Source.USUAL:
                metrics.usual(inputs, batch.table.version[tokens] == version, first_pass=first_pass)
            elif metrics is not None and first_pass:
                metrics.expert(inputs)
        return terms

    def _predict(self, model: nn.Module, micro: MicroBatch, table: TokenTable) -> tuple[Tensor, Tensor]:
        return predict(
            model,
            micro,
            table,
            chunk=self.config.logprob_chunk,
            entropy_gradient=self.recipe.uses_entropy,
            bf16=self.precision == "bf16",
        )

    def _micro_batches(self, batch: _Part, chosen: list[int]) -> list[MicroBatch]:
        budget = self.config.micro_batch_tokens
        return micro_batches(batch.experiences, batch.table, chosen, budget, self.device)

    def _scores(self, experiences: Sequence[Experience], table: TokenTable, version: int) -> Scores:
        """Old and reference log-probs, where this batch needs them."""
        single = self.config.updates_per_batch * self.config.epochs_per_batch == 1
        fresh = bool((table.version[~table.expert] == version).all())
        recompute = self.recipe.importance_cap is not None
        old = None
        if not (single and (fresh or recompute)):
            old = self._evaluate(self.model, experiences, table) if recompute else table.rollout_logprob
        reference = None if self._reference is None else self._evaluate(self._reference, experiences, table)
        return Scores(old, reference)

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, experiences: Sequence[Experience], table: TokenTable) -> Tensor:
        """Log-probs of all rolled-out action tokens of the batch: float32 [A], 0 for experts."""
        result = torch.zeros_like(table.rollout_logprob)
        usual = [i for i, e in enumerate(experiences) if e.source is Source.USUAL]
        for micro in micro_batches(experiences, table, usual, self.config.micro_batch_tokens, self.device):
            with attending_to(model, micro):
                result[micro.tokens] = self._predict(model, micro, table)[0].float()
        return result

    def _check_loss(self, batch: _Part, micro: MicroBatch, terms: dict[str, tuple[float, Tensor]]) -> None:
        for name, (_, value) in terms.items():
            if not math.isfinite(value.item()):
                self._fail(batch, micro, f"loss term {name!r} is {value.item()}")

    def _blame_gradient(self, batch: _Part, micros: list[MicroBatch]) -> None:
        """Find the first micro-batch whose gradient is not finite, and report it."""
        for micro in micros:
            self._optimizer.zero_grad(set_to_none=True)
            with attending_to(self.model, micro):
                terms = self._forward(batch, micro, None, 0, first_pass=False)
                _total(terms).backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    self._fail(batch, micro, f"the gradient of {name} by loss terms {', '.join(terms)} is not finite")
        self._fail(batch, micros[-1], "the sum of the micro-batches' gradients is not finite")

    def _fail(self, batch: _Part, micro: MicroBatch, what: str) -> NoReturn:
        self._optimizer.zero_grad(set_to_none=True)
        tasks = sorted({batch.experiences[i].task_id for i in micro.experiences})
        shown = ", ".join(tasks[:8]) + (f" and {len(tasks) - 8} more" if len(tasks) > 8 else "")
        raise TrainingError(
            f"training step {self.steps}: {what}, in a micro-batch with tasks {shown}. No weight was changed by this "
            "update. Lower trainer.lr, use trainer.precision: fp32, or look at the rewards of these tasks."
        )


@dataclass(frozen=True)
class _Part:
    """The share of a batch that one optimizer step learns from."""

    experiences: Sequence[Experience]
    table: TokenTable
    objective: Objective
    chosen: list[int]


def _total(terms: dict[str, tuple[float, Tensor]]) -> Tensor:
    return torch.stack([weight * value for weight, value in terms.values()]).sum()


def _master(model: nn.Module) -> nn.Module:
    """fp32 master weights (float64 models stay float64)."""
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return model.float() if narrow else model


def _checkpoint_activations(model: Any, wanted: bool) -> None:
    renamed = hasattr(model, "activation_checkpointing_enable")  # since transformers 5.2x
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    if wanted:
        getattr(model, f"{name}_enable")({"use_reentrant": False})
    elif getattr(model, f"is_{name}"):  # an earlier stage wanted it
        getattr(model, f"{name}_disable")()


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off; layers that checkpoint their activations stay in training mode, without which they would not."""
    before = {module: module.training for module in model.modules()}
    for module in before:
        module.training = isinstance(module, GradientCheckpointingLayer)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
