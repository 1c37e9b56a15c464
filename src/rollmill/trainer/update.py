"""Optimizer steps of the policy, each over a part of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from rollmill.core.types import Experience, Source
from rollmill.trainer.batch import MicroBatch, TokenTable
from rollmill.trainer.divergences import token_divergences
from rollmill.trainer.failure import training_failure
from rollmill.trainer.logprobs import attending_to
from rollmill.trainer.metrics import TokenMetrics
from rollmill.trainer.objective import Objective
from rollmill.trainer.optimizer import clip, gradient_norm, gradients
from rollmill.trainer.passes import Passes
from rollmill.trainer.sharding import inside

Terms = dict[str, tuple[float, Tensor]]
Culprit = tuple[str, list[int]]
"""What is wrong, and the experiences that it is wrong with."""


@dataclass(frozen=True)
class Part:
    """The share of a batch that one optimizer step learns from: the experiences `chosen`."""

    experiences: Sequence[Experience]
    table: TokenTable
    objective: Objective
    chosen: list[int]
    step: int  #: training step
    version: int  #: of the weights at its start


class Updates:
    """Makes them.

    Args:
        teacher: for a recipe that distils.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, passes: Passes, teacher: nn.Module | None
    ) -> None:
        self._model, self._optimizer, self._passes, self._teacher = model, optimizer, passes, teacher
        self._recipe, self._ranks = passes.recipe, passes.ranks

    def make(self, part: Part, metrics: TokenMetrics, *, first_pass: bool) -> dict[str, float]:
        """One optimizer step: loss, loss/<term> and grad_norm, or `skipped` where nothing has a gradient.

        Raises:
            TrainingError: a loss or gradient is not finite, on whichever rank; the weights are as before.
        """
        learned = set(part.objective.learned)
        if first_pass:
            silent = [i for i in part.chosen if i not in learned and part.experiences[i].source is Source.USUAL]
            with torch.no_grad():
                for micro in self._passes.rows(part.experiences, part.table, silent):
                    self.forward(part, micro, metrics, first_pass=True)
        if not learned:
            return {"skipped": 1.0}
        self._optimizer.zero_grad(set_to_none=True)
        micros = self._passes.rows(part.experiences, part.table, part.objective.learned)
        totals, culprit = {"loss": 0.0}, None
        for micro in micros:
            with attending_to(self._model, micro, replay=True):
                loss, terms = self.forward(part, micro, metrics, first_pass=first_pass)
                loss.backward()
            totals["loss"] += loss.item()
            for name, (_, value) in terms.items():
                totals[f"loss/{name}"] = totals.get(f"loss/{name}", 0.0) + value.item()
                if culprit is None and not math.isfinite(value.item()):
                    culprit = f"loss term {name!r} is {value.item()}", micro.experiences
        totals = self._ranks.merged(totals)
        if not all(math.isfinite(value) for value in totals.values()):
            self._fail(part, self._ranks.first(culprit) or ("the loss is not finite", part.chosen))
        self._ranks.add_gradients(list(self._model.parameters()))
        grads = gradients(self._optimizer)
        norm = gradient_norm(grads)
        if not math.isfinite(norm):
            self._blame_gradient(part, micros)
        clip(grads, norm, self._passes.config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {**totals, "grad_norm": norm}

    def forward(
        self, part: Part, micro: MicroBatch, metrics: TokenMetrics | None, *, first_pass: bool
    ) -> tuple[Tensor, Terms]:
        """The loss of one micro-batch; weight and share of every term."""
        logprob, entropy, divergence = inside(self._model, lambda: self._predicted(micro, part.table))
        terms: Terms = {}
        for source in Source:
            inputs, tokens = part.objective.inputs(micro, logprob, entropy, source, divergence)
            if not len(tokens):
                continue
            terms |= part.objective.terms(inputs, tokens, source)
            if metrics is not None and source is Source.USUAL:
                metrics.usual(inputs, part.table.version[tokens] == part.version, first_pass=first_pass)
            elif metrics is not None and first_pass:
                metrics.demonstrated(inputs)
        return _total(terms) if terms else logprob.sum(), terms

    def _predicted(self, micro: MicroBatch, table: TokenTable) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropies and divergences from the teacher of a micro-batch's tokens."""
        with attending_to(self._model, micro, replay=True):
            hidden_Td = self._passes.hidden(self._model, micro)
            logprob, entropy = self._passes.predict(self._model, micro, table, hidden_Td)
        return logprob, entropy, self._divergence(hidden_Td, micro, table)

    def _divergence(self, hidden_Td: Tensor, micro: MicroBatch, table: TokenTable) -> Tensor | None:
        """From the teacher, of a micro-batch's tokens."""
        if self._recipe.distill is None:
            return None
        assert self._teacher is not None, "a recipe that distils needs a teacher"
        with torch.no_grad(), attending_to(self._teacher, micro):
            teacher_Td = self._passes.hidden(self._teacher, micro)
        target_M = table.target[micro.tokens]
        return token_divergences(
            self._model,
            self._teacher,
            hidden_Td,
            teacher_Td,
            micro.rows,
            target_M,
            self._recipe.distill,
            chunk=self._passes.config.logprob_chunk,
        )

    def _blame_gradient(self, part: Part, micros: list[MicroBatch]) -> NoReturn:
        """Find the first micro-batch whose gradient is not finite, and report it on all ranks. (With shards every rank
        has to make every pass, so none looks for it.)"""
        found = self._ranks.first(self._culprit(part, micros) if self._ranks.sharding == "none" else None)
        alone = bool(micros) and self._ranks.size == 1
        last = micros[-1].experiences if alone else part.chosen
        self._fail(part, found or ("the sum of the micro-batches' gradients is not finite", last))

    def _culprit(self, part: Part, micros: list[MicroBatch]) -> Culprit | None:
        """What is wrong with one of this rank's micro-batches, and its experiences."""
        for micro in micros:
            self._optimizer.zero_grad(set_to_none=True)
            with attending_to(self._model, micro, replay=True):
                loss, terms = self.forward(part, micro, None, first_pass=False)
                loss.backward()
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    what = f"the gradient of {name} by loss terms {', '.join(terms)} is not finite"
                    return what, micro.experiences
        return None

    def _fail(self, part: Part, culprit: Culprit) -> NoReturn:
        self._optimizer.zero_grad(set_to_none=True)
        what, members = culprit
        raise training_failure(part.step, what, [part.experiences[i].task_id for i in members])


def _total(terms: Terms) -> Tensor:
    return torch.stack([weight * value for weight, value in terms.values()]).sum()
