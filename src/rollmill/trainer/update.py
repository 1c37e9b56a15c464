"""Optimizer steps of the policy, each on a part of a batch; `split_mini_batches` makes the parts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from rollmill.algorithms.recipe import Recipe
from rollmill.trainer.batch import MicroBatch, TokenTable
from rollmill.trainer.distributed.fsdp import call_unsharded
from rollmill.trainer.kto_baseline import compute_kto_baseline
from rollmill.trainer.logprobs import ForwardPasses, compute_vocabulary_sums, use_packed_attention
from rollmill.trainer.loss import StepLoss
from rollmill.trainer.metrics import TokenMetrics
from rollmill.trainer.optimizer import clip_gradients, collect_gradients, compute_gradient_norm, failed_step_error
from rollmill.trainer.teacher import Teacher, compute_divergences
from rollmill.types import Experience, ExperienceSource

LossTermValues = dict[str, tuple[float, Tensor]]
FailureCause = tuple[str, list[int]]
"""Description of the failure, and indices of the affected experiences."""


@dataclass(frozen=True)
class MiniBatch:
    """The experiences `chosen` of a batch, for one optimizer step."""

    experiences: Sequence[Experience]
    table: TokenTable
    objective: StepLoss
    chosen: list[int]
    step: int  #: training step
    fresh: Tensor  #: bool [A], sampled with the weights of this part's first pass
    draws: torch.Generator  #: for random choices among tokens; in the same state on all ranks


def _read_losses(
    found: Sequence[tuple[list[int], Mapping[str, Tensor]]],
) -> tuple[dict[str, float], FailureCause | None]:
    """Sums by name the losses of micro-batches, each with its experiences, and finds the first term that is not finite.

    All are read at once, after the last backward pass: reading one makes the host wait for the device.
    """
    values = [value.double() for _, losses in found for value in losses.values()]
    numbers = iter(torch.stack(values).tolist() if values else [])
    totals: dict[str, float] = {"loss": 0.0}
    culprit: FailureCause | None = None
    for experiences, losses in found:
        for name in losses:
            number = next(numbers)
            totals[name] = totals.get(name, 0.0) + number
            if culprit is None and name != "loss" and not math.isfinite(number):
                culprit = f"loss term {name.removeprefix('loss/')!r} is {number}", experiences
    return totals, culprit


class PolicyUpdater:
    """Takes optimizer steps on mini-batches, at once or in two halves: `forward_backward` any number of times, `step`.

    Args:
        teacher: for a recipe that distils.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, passes: ForwardPasses, teacher: Teacher | None
    ) -> None:
        self._model, self._optimizer, self._passes, self._teacher = model, optimizer, passes, teacher
        self._ranks = passes.ranks
        self._pending: list[tuple[MiniBatch, list[MicroBatch]]] = []

    @property
    def _recipe(self) -> Recipe:
        return self._passes.recipe

    def make(self, part: MiniBatch, metrics: TokenMetrics, *, first_pass: bool) -> dict[str, float]:
        """Takes one optimizer step; returns loss, loss/<term> and grad_norm, or `skipped` if nothing has a gradient.

        Raises:
            TrainingError: a loss or gradient is not finite on any rank; the weights are unchanged.
        """
        self.discard()
        losses = self.forward_backward(part, metrics, first_pass=first_pass)
        return {**losses, **self.step(self._passes.config.max_grad_norm)}

    def forward_backward(self, part: MiniBatch, metrics: TokenMetrics, *, first_pass: bool) -> dict[str, float]:
        """Adds the gradients of a mini-batch to those since the last step.

        Returns loss and loss/<term>; nothing if no experience has a gradient.

        Raises:
            TrainingError: a loss is not finite on any rank; all gradients are discarded.
        """
        if self._recipe.needs_step_statistics:
            self._choose(part)
        learned = set(part.objective.learned)
        if part.objective.mismatched is not None:
            part.objective.kl_baseline = compute_kto_baseline(
                self._model, self._passes, part.objective.mismatched, part.chosen
            )
        if first_pass:
            silent = [
                i for i in part.chosen if i not in learned and part.experiences[i].source is ExperienceSource.ROLLOUT
            ]
            shown = self._sample_for_metrics(silent, part.step)
            with torch.no_grad():
                for micro in self._passes.rows(part.experiences, part.table, shown):
                    self.forward(part, micro, metrics, first_pass=True, weight=len(silent) / len(shown))
        if not learned:
            return {}
        micros = self._passes.rows(part.experiences, part.table, part.objective.learned)
        found: list[tuple[list[int], dict[str, Tensor]]] = []
        for micro in micros:
            with use_packed_attention(self._model, micro, replay=True):
                loss, terms = self.forward(part, micro, metrics, first_pass=first_pass)
                loss.backward()
            found.append((micro.experiences, {"loss": loss.detach()}))
            found[-1][1].update((f"loss/{name}", value.detach()) for name, (_, value) in terms.items())
        totals, culprit = _read_losses(found)
        totals = self._ranks.merged(totals)
        if not all(math.isfinite(value) for value in totals.values()):
            self._fail(part, self._ranks.first(culprit) or ("the loss is not finite", part.chosen))
        self._pending.append((part, micros))
        return totals

    def step(self, max_norm: float) -> dict[str, float]:
        """Takes one optimizer step with the gradients since the last one; returns grad_norm (of their sum, before it is
        clipped to `max_norm`), or `skipped` if there are none.

        Raises:
            TrainingError: a gradient is not finite on any rank; all are discarded, and the weights are unchanged.
        """
        if not self._pending:
            return {"skipped": 1.0}
        self._ranks.add_gradients(list(self._model.parameters()))
        grads = collect_gradients(self._optimizer)
        norm = compute_gradient_norm(grads)
        if not math.isfinite(norm):
            self._blame_gradient()
        clip_gradients(grads, norm, max_norm)
        self._optimizer.step()
        self.discard()
        return {"grad_norm": norm}

    def discard(self) -> None:
        """Forgets all gradients since the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._pending.clear()

    def _sample_for_metrics(self, silent: list[int], step: int) -> list[int]:
        """Draws completions without an advantage, which are seen for the metrics alone; the same on all ranks."""
        count = math.ceil(self._passes.config.metrics_share * len(silent))
        if count == len(silent):
            return silent
        return sorted(random.Random(step).sample(silent, count))

    def forward(
        self,
        part: MiniBatch,
        micro: MicroBatch,
        metrics: TokenMetrics | None,
        *,
        first_pass: bool,
        weight: float = 1.0,
    ) -> tuple[Tensor, LossTermValues]:
        """Returns the loss of one micro-batch, and weight and share of every term.

        Args:
            weight: number of tokens that each of the micro-batch stands for in the metrics.
        """
        taught = None if self._teacher is None else self._teacher.hidden(part.experiences, micro)
        logprob, entropy, divergence = call_unsharded(self._model, lambda: self._predicted(micro, part.table, taught))
        if metrics is not None and first_pass:
            metrics.record(micro.tokens, logprob, entropy)
        terms: LossTermValues = {}
        for source, domain in part.objective.kinds:
            inputs, tokens = part.objective.inputs(micro, logprob, entropy, source, divergence, domain)
            if not len(tokens):
                continue
            terms |= part.objective.terms(inputs, tokens, source, domain)
            if metrics is not None and source is ExperienceSource.ROLLOUT:
                metrics.usual(inputs, part.fresh[tokens], first_pass=first_pass, domain=domain, weight=weight)
            elif metrics is not None and first_pass:
                metrics.demonstrated(inputs)
        return _total(terms) if terms else logprob.sum(), terms

    def _choose(self, part: MiniBatch) -> None:
        """Applies masks to all tokens of the step at once, after a pass without gradient over its rollouts.

        The result therefore does not depend on micro-batches and ranks.
        """
        table, passes = part.table, self._passes
        shape = (3, len(table.target))
        seen = torch.zeros(shape, dtype=torch.float64, device=table.target.device)
        for micro in passes.rows(part.experiences, table, part.objective.counted):
            with torch.no_grad():
                seen[:, micro.tokens] = call_unsharded(self._model, partial(self._surveyed, micro, table)).to(
                    seen.dtype
                )
        logprob, entropy, discriminant = self._ranks.add(seen).to(table.rollout_logprob.dtype)
        draw = torch.rand(shape[1], generator=part.draws).to(seen.device)
        part.objective.choose(logprob, entropy, discriminant if self._recipe.uses_expected_discriminant else None, draw)

    def _surveyed(self, micro: MicroBatch, table: TokenTable) -> Tensor:
        """Log-probs, entropies and expected discriminants (0 unless a mask uses them) of a micro-batch, [3, M]."""
        with use_packed_attention(self._model, micro, replay=True):
            hidden_Td = self._passes.hidden(self._model, micro)
            logprob, entropy = self._passes.predict(self._model, micro, table, hidden_Td)
            discriminant = torch.zeros_like(logprob)
            if self._recipe.uses_expected_discriminant:
                chunk = self._passes.config.logprob_chunk
                sums = compute_vocabulary_sums(self._model, hidden_Td, micro, table, chunk=chunk)
                discriminant = sums.expected_discriminant.to(logprob.dtype)
        return torch.stack([logprob, entropy, discriminant])

    def _predicted(
        self, micro: MicroBatch, table: TokenTable, taught_md: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropies and divergences of a micro-batch; `taught_md` are the teacher's hidden states."""
        with use_packed_attention(self._model, micro, replay=True):
            hidden_Td = self._passes.hidden(self._model, micro)
            logprob, entropy = self._passes.predict(self._model, micro, table, hidden_Td)
        if self._teacher is None or taught_md is None:
            return logprob, entropy, None
        assert self._recipe.distill is not None
        divergence = compute_divergences(
            self._model,
            self._teacher.model,
            hidden_Td,
            micro.own_rows,
            taught_md,
            table.target[micro.own(micro.tokens)],
            self._recipe.distill,
            chunk=self._passes.config.logprob_chunk,
        )
        return logprob, entropy, micro.gather(divergence)[0]

    def _blame_gradient(self) -> NoReturn:
        """Finds the first micro-batch whose gradient is not finite, and raises on all ranks.

        With shards every rank must make every pass, so none searches.
        """
        for part, micros in self._pending:
            found = self._ranks.first(self._culprit(part, micros) if self._ranks.sharding == "none" else None)
            if found is not None:
                self._fail(part, found)
        part, micros = self._pending[-1]
        alone = bool(micros) and self._ranks.size == 1
        last = micros[-1].experiences if alone else part.chosen
        self._fail(part, ("the sum of the micro-batches' gradients is not finite", last))

    def _culprit(self, part: MiniBatch, micros: list[MicroBatch]) -> FailureCause | None:
        """Describes the first of this rank's micro-batches with a gradient that is not finite, and its experiences."""
        for micro in micros:
            self._optimizer.zero_grad(set_to_none=True)
            with use_packed_attention(self._model, micro, replay=True):
                loss, terms = self.forward(part, micro, None, first_pass=False)
                loss.backward()
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    what = f"the gradient of {name} by loss terms {', '.join(terms)} is not finite"
                    return what, micro.experiences
        return None

    def _fail(self, part: MiniBatch, culprit: FailureCause) -> NoReturn:
        self.discard()
        what, members = culprit
        raise failed_step_error(part.step, what, [part.experiences[i].task_id for i in members])


def _total(terms: LossTermValues) -> Tensor:
    return torch.stack([weight * value for weight, value in terms.values()]).sum()


def split_mini_batches(
    experiences: Sequence[Experience],
    parts: int,
    generator: torch.Generator | None,
    domains: Sequence[str] | None = None,
) -> list[list[int]]:
    """Splits a batch into the parts of its optimizer steps: indices of the experiences of each part.

    Groups are never split. Each source and domain is dealt separately, so that every part gets its share of each. Parts
    that stay empty because there are too few groups are left out.

    Args:
        generator: shuffles the groups; None keeps their order.
        domains: domain of each experience; None: one for all.
    """
    result: list[list[int]] = [[] for _ in range(parts)]
    of = domains or [""] * len(experiences)
    for source, domain in [(source, domain) for source in ExperienceSource for domain in dict.fromkeys(of)]:
        groups: dict[str, list[int]] = {}
        for i, experience in enumerate(experiences):
            if experience.source is source and of[i] == domain:
                groups.setdefault(experience.group, []).append(i)
        members = list(groups.values())
        if generator is not None:
            members = [members[i] for i in torch.randperm(len(members), generator=generator).tolist()]
        for n, group in enumerate(members):
            result[n * parts // len(members)].extend(group)
    return [part for part in result if part]
