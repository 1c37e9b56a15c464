"""The trainer: one batch of experiences in, one or more optimizer steps, metrics out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.algorithms.kl import AdaptiveKL
from rollmill.algorithms.recipe import Recipe
from rollmill.config.trainer import TrainerConfig
from rollmill.core.types import Experience, Source
from rollmill.models.norms import Replacements, find_norms, replaced
from rollmill.trainer.batch import MicroBatch, TokenTable, micro_batches
from rollmill.trainer.calibrate import choose_precision
from rollmill.trainer.critic import Critic, usual_experiences, value_metrics
from rollmill.trainer.divergences import token_divergences
from rollmill.trainer.failure import training_failure
from rollmill.trainer.inference import Inference
from rollmill.trainer.logprobs import attending_to, hidden_states, predict
from rollmill.trainer.metrics import TokenMetrics
from rollmill.trainer.objective import Judgement, Objective, Scores, judge
from rollmill.trainer.optimizer import Held, build_optimizer, clip, gradient_norm, gradients, state_tensors
from rollmill.trainer.parts import cut
from rollmill.trainer.preparation import checkpoint_activations, evaluation_mode, master_weights
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.reference import Reference
from rollmill.trainer.schedule import learning_rate
from rollmill.trainer.sharding import inside, load_optimizer, shard, whole

Terms = dict[str, tuple[float, Tensor]]


class Trainer:
    """Learns from batches of experiences by a recipe, on one device.

    Old log-probs (the policy a ratio is taken to): with one optimizer step per batch, and either all tokens made by the
    current weights or old log-probs to be recomputed, they are the policy's own, detached, so the ratio is exactly 1.
    Otherwise (several optimizer steps, or stale tokens) they are what the recipe's `proximal` says: those the rollout
    recorded, those recomputed once before the first step, or an interpolation.

    An optimizer step in which no token has a gradient (every advantage 0, and no other term) is skipped: the moments of
    Adam would move the weights without any evidence. The metric `skipped` counts them. Experiences without a gradient
    are only run forward, for the metrics.

    Args:
        model: a transformers causal LM; its weights become the fp32 master weights and are changed in place.
        total_steps: training steps of the stage, for the schedule.
        reference: frozen policy for the KL term; by default the policy as it is now, if the recipe needs one.
        teacher: frozen model with the policy's vocabulary, for a recipe that distils.
        ranks: data-parallel ranks; every rank calls `step` with the same batch. Default those of torch.distributed.
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
        ranks: Ranks | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.model = master_weights(model.to(self.device))
        self.recipe, self.config, self.total_steps = recipe, config, total_steps
        self.precision = choose_precision(model, device) if config.precision == "auto" else config.precision
        self.steps = 0
        self._ranks = ranks or Ranks.of_process()
        self._generator = torch.Generator().manual_seed(seed)
        checkpoint_activations(self.model, config.gradient_checkpointing)
        self._reference = Reference(self.model, reference, self.device) if recipe.uses_reference else None
        self._teacher = None if teacher is None else teacher.to(self.device).requires_grad_(False).eval()
        self._critic: Critic | None = None
        if recipe.critic is not None:
            bf16 = self.precision == "bf16"
            self._critic = Critic(
                self.model, recipe.critic, config, total_steps=total_steps, bf16=bf16, ranks=self._ranks
            )
        self._kl: AdaptiveKL | None = None
        if recipe.kl.target is not None:
            self._kl = AdaptiveKL(recipe.kl.coefficient, target=recipe.kl.target, horizon=recipe.kl.horizon)
        self._norms = self._find_norms()
        if self._ranks.sharded:
            self._shard()
        self._optimizer = build_optimizer(self.model, config)
        self._inference = Inference(
            self.model,
            recipe,
            config,
            reference=self._reference,
            critic=self._critic,
            ranks=self._ranks,
            rows=self._rows,
            predict=self._predict,
            ready=self._ready,
        )
        self._refreshed: int | None = None

    @property
    def kl_coefficient(self) -> float:
        """Weight of the KL penalty now."""
        return self.recipe.kl.coefficient if self._kl is None else self._kl.coefficient

    def ahead(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """The forward passes of `step` that need no rewards, one by one; `step` on the same batch goes on from there.

        These are old and reference log-probs and values. There may be none.
        """
        self._refresh_reference()
        return self._inference.ahead(experiences, version, self.device)

    def step(self, experiences: Sequence[Experience], version: int) -> dict[str, float]:
        """Learn from one batch; `version` is the version of the weights as they are now.

        Sets each experience's `advantage`. Returns the metrics: loss, loss/<term>, grad_norm and lr (of the last update
        where they differ: lr; means over the updates: the others), entropy, kl (k3 from rollout policy to current),
        kl_ref, ratio/mean, ratio/clip_fraction, logprob_gap/mean and /max (|trainer - rollout| over tokens made by the
        current weights), tokens (action tokens), updates and skipped; weight/<term> where it follows a schedule,
        kl_coefficient where it adapts, value/... where there is a critic.

        Raises:
            TrainingError: a loss or gradient is not finite; the weights are as before the failing update.
        """
        config = self.config
        if self.recipe.reset_optimizer:
            self._optimizer.state.clear()
        self._refresh_reference()
        table, scores = self._inference.take(experiences, version, self.device)
        lr = learning_rate(config, self.steps, self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        metrics, totals, updates = TokenMetrics(self.recipe, self._ranks), _Totals(), 0
        extra = {f"weight/{t.name}": t.weight_at(self.steps) for t in self.recipe.terms if callable(t.weight)}
        extra |= {"kl_coefficient": self.kl_coefficient} if self._kl else {}
        with self._ready():
            judgement = judge(experiences, table, self.recipe, scores, kl_coefficient=self.kl_coefficient)
            for epoch in range(config.epochs_per_batch):
                for part in cut(experiences, config.updates_per_batch, self._generator if epoch else None):
                    objective = Objective(
                        self.recipe,
                        table,
                        judgement,
                        scores,
                        part,
                        step=self.steps,
                        version=version,
                        kl_coefficient=self.kl_coefficient,
                    )
                    batch = _Part(experiences, table, objective, part)
                    if not self._critic_only:
                        totals.add(self._update(batch, metrics, version, first_pass=epoch == 0))
                    totals.add(self._update_critic(batch, judgement, scores))
                    updates += 1
        if scores.values is not None and judgement.returns is not None:
            usual = ~table.expert & judgement.counted[table.experience]
            extra |= value_metrics(scores.values, judgement.returns, usual)
        self.steps += 1
        found = metrics.result()
        if self._kl is not None and "kl_ref" in found:
            self._kl.update(found["kl_ref"], sum(e.source is Source.USUAL for e in experiences))
        skipped = totals.pop("skipped")
        counts = {"tokens": float(len(table.target)), "updates": updates - skipped, "skipped": skipped}
        return {"loss": 0.0, "grad_norm": 0.0, **totals.means(updates), **found, "lr": lr, **extra, **counts}

    def held(self) -> dict[str, Held]:
        """What lies in memory between steps, by the names that the key `residency` has for it."""
        found: dict[str, Held] = {
            "policy": self.model.parameters,
            "optimizer": partial(state_tensors, self._optimizer),
        }
        if self._reference is not None and self._reference.model is not None:
            found["reference"] = self._reference.model.parameters
        if self._teacher is not None:
            found["teacher"] = self._teacher.parameters
        return found if self._critic is None else found | self._critic.held()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed trainer needs besides the model's weights: the same on however many ranks, whole tensors.

        With shards all ranks call this together, and rank 0 gets it.
        """
        state = {
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "generator": self._generator.get_state(),
            "precision": self.precision,
            "reference": None if self._reference is None else self._reference.state_dict(),
            "critic": None if self._critic is None else self._critic.state_dict(),
            "kl": None if self._kl is None else self._kl.state_dict(),
        }
        found: dict[str, Any] = whole(state)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        load_optimizer(self._optimizer, state["optimizer"])
        self.steps, self.precision = state["steps"], state["precision"]
        self._generator.set_state(state["generator"])
        if self._reference is not None:
            self._reference.load_state_dict(state["reference"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])
        if self._kl is not None:
            self._kl.load_state_dict(state["kl"])

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Models as they are during a pass: dropout off, fast norms."""
        critic = nullcontext() if self._critic is None else evaluation_mode(self._critic.model)
        with evaluation_mode(self.model), critic, replaced(self._norms):
            yield

    def _refresh_reference(self) -> None:
        """Every N steps, once, the policy of the moment becomes the reference."""
        refresh = self.recipe.kl.refresh_every
        if self._reference is not None and refresh and self.steps % refresh == 0 and self._refreshed != self.steps:
            self._reference.refresh()
            self._refreshed = self.steps

    @property
    def _critic_only(self) -> bool:
        return self._critic is not None and self.steps < self._critic.options.warmup_steps

    def _shard(self) -> None:
        critic = None if self._critic is None else self._critic.model
        reference = None if self._reference is None else self._reference.model
        for model in (self.model, reference, critic):
            if model is not None:
                shard(model)

    def _find_norms(self) -> Replacements:
        if self.device.type != "cpu":
            return []
        critic = None if self._critic is None else self._critic.model
        reference = None if self._reference is None else self._reference.model
        return find_norms(*(model for model in (self.model, reference, critic) if model is not None))

    def _update(self, batch: _Part, metrics: TokenMetrics, version: int, *, first_pass: bool) -> dict[str, float]:
        """One optimizer step over a part of the batch."""
        learned = set(batch.objective.learned)
        if first_pass:
            silent = [i for i in batch.chosen if i not in learned and batch.experiences[i].source is Source.USUAL]
            with torch.no_grad():
                for micro in self._rows(batch.experiences, batch.table, silent):
                    self._forward(batch, micro, metrics, version, first_pass=True)
        if not learned:
            return {"skipped": 1.0}
        self._optimizer.zero_grad(set_to_none=True)
        micros = self._rows(batch.experiences, batch.table, batch.objective.learned)
        totals = {"loss": 0.0}
        for micro in micros:
            with attending_to(self.model, micro):
                loss, terms = self._forward(batch, micro, metrics, version, first_pass=first_pass)
                self._check_loss(batch, micro, terms)
                loss.backward()
            totals["loss"] += loss.item()
            for name, (_, value) in terms.items():
                totals[f"loss/{name}"] = totals.get(f"loss/{name}", 0.0) + value.item()
        self._ranks.add_gradients(list(self.model.parameters()))
        grads = gradients(self._optimizer)
        norm = self._ranks.norm(gradient_norm(grads))
        if not math.isfinite(norm):
            self._blame_gradient(batch, micros)
        clip(grads, norm, self.config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {**self._ranks.merged(totals), "grad_norm": norm}

    def _update_critic(self, batch: _Part, judgement: Judgement, scores: Scores) -> dict[str, float]:
        if self._critic is None:
            return {}
        assert scores.values is not None
        assert judgement.returns is not None
        chosen = usual_experiences(batch.experiences, batch.table, batch.chosen, judgement.counted)
        if not chosen:
            return {}
        counted = torch.zeros_like(judgement.counted)
        counted[chosen] = True
        micros = self._rows(batch.experiences, batch.table, chosen)
        tasks = [batch.experiences[i].task_id for i in chosen]
        return self._critic.update(micros, batch.table, counted, judgement.returns, scores.values, self.steps, tasks)

    def _forward(
        self, batch: _Part, micro: MicroBatch, metrics: TokenMetrics | None, version: int, *, first_pass: bool
    ) -> tuple[Tensor, Terms]:
        """The loss of one micro-batch; weight and share of every term."""
        logprob, entropy, divergence = inside(self.model, lambda: self._predicted(micro, batch.table))
        terms: Terms = {}
        for source in Source:
            inputs, tokens = batch.objective.inputs(micro, logprob, entropy, source, divergence)
            if not len(tokens):
                continue
            terms |= batch.objective.terms(inputs, tokens, source)
            if metrics is not None and source is Source.USUAL:
                metrics.usual(inputs, batch.table.version[tokens] == version, first_pass=first_pass)
            elif metrics is not None and first_pass:
                metrics.demonstrated(inputs)
        return _total(terms) if terms else logprob.sum(), terms

    def _predicted(self, micro: MicroBatch, table: TokenTable) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropies and divergences from the teacher of a micro-batch's tokens."""
        with attending_to(self.model, micro):
            hidden_Td = hidden_states(self.model, micro, bf16=self.precision == "bf16")
            logprob, entropy = self._predict(self.model, micro, table, hidden_Td)
        return logprob, entropy, self._divergence(hidden_Td, micro, table)

    def _divergence(self, hidden_Td: Tensor, micro: MicroBatch, table: TokenTable) -> Tensor | None:
        """From the teacher, of a micro-batch's tokens."""
        if self.recipe.distill is None:
            return None
        assert self._teacher is not None, "a recipe that distils needs a teacher"
        with torch.no_grad(), attending_to(self._teacher, micro):
            teacher_Td = hidden_states(self._teacher, micro, bf16=self.precision == "bf16")
        target_M = table.target[micro.tokens]
        return token_divergences(
            self.model,
            self._teacher,
            hidden_Td,
            teacher_Td,
            micro.rows,
            target_M,
            self.recipe.distill,
            chunk=self.config.logprob_chunk,
        )

    def _predict(
        self, model: nn.Module, micro: MicroBatch, table: TokenTable, hidden_Td: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return predict(
            model,
            micro,
            table,
            hidden_Td=hidden_Td,
            chunk=self.config.logprob_chunk,
            entropy_gradient=self.recipe.uses_entropy,
            bf16=self.precision == "bf16",
        )

    def _rows(self, experiences: Sequence[Experience], table: TokenTable, chosen: list[int]) -> list[MicroBatch]:
        """This rank's share of the chosen experiences."""
        return micro_batches(
            experiences,
            table,
            chosen,
            self.config.micro_batch_tokens,
            self.device,
            keep_groups=self.recipe.keeps_groups,
            ranks=self._ranks.size,
            rank=self._ranks.rank,
            even=self._ranks.sharded,
        )

    def _check_loss(self, batch: _Part, micro: MicroBatch, terms: Terms) -> None:
        for name, (_, value) in terms.items():
            if self._ranks.size == 1 and not math.isfinite(value.item()):
                self._fail(batch, micro.experiences, f"loss term {name!r} is {value.item()}")

    def _blame_gradient(self, batch: _Part, micros: list[MicroBatch]) -> None:
        """Find the first micro-batch whose gradient is not finite, and report it on all ranks. (With shards every rank
        has to make every pass, so none looks for it.)"""
        found = self._ranks.first(None if self._ranks.sharded else self._culprit(batch, micros))
        if found is None:
            last = micros[-1].experiences if micros and self._ranks.size == 1 else batch.chosen
            found = "the sum of the micro-batches' gradients is not finite", last
        self._fail(batch, found[1], found[0])

    def _culprit(self, batch: _Part, micros: list[MicroBatch]) -> tuple[str, list[int]] | None:
        """What is wrong with one of this rank's micro-batches, and its experiences."""
        for micro in micros:
            self._optimizer.zero_grad(set_to_none=True)
            with attending_to(self.model, micro):
                loss, terms = self._forward(batch, micro, None, 0, first_pass=False)
                loss.backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    what = f"the gradient of {name} by loss terms {', '.join(terms)} is not finite"
                    return what, micro.experiences
        return None

    def _fail(self, batch: _Part, members: list[int], what: str) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        raise training_failure(self.steps, what, [batch.experiences[i].task_id for i in members])


@dataclass(frozen=True)
class _Part:
    """The share of a batch that one optimizer step learns from."""

    experiences: Sequence[Experience]
    table: TokenTable
    objective: Objective
    chosen: list[int]


class _Totals:
    """Sums of the updates' numbers."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def pop(self, name: str) -> float:
        return self._sums.pop(name, 0.0)

    def means(self, updates: int) -> dict[str, float]:
        return {name: value / max(updates, 1) for name, value in self._sums.items()}


def _total(terms: Terms) -> Tensor:
    return torch.stack([weight * value for weight, value in terms.values()]).sum()
