"""The trainer in pieces, for training loops of one's own: gradients of a batch, an optimizer step, log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rollmill.algorithms.recipe import Recipe
from rollmill.errors import TrainingError
from rollmill.trainer.batch import build_token_table
from rollmill.trainer.coefficients import LossCoefficients
from rollmill.trainer.metrics import TokenMetrics
from rollmill.trainer.trainer import Trainer
from rollmill.types import Experience, ExperienceSource, FloatArray


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW for one optimizer step. All parameters decay, and a `max_grad_norm` of infinity clips nothing."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float

    def options(self) -> dict[str, Any]:
        """The options of the optimizer's parameter groups."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


class StepwiseTrainer(Trainer):
    """A trainer whose caller decides when gradients are computed and when an optimizer step is taken.

    `forward_backward` once and `optim_step` are `step` with one update per batch. Reference, critic and teacher are
    those of the trainer's own recipe.
    """

    _gradients = 0  # calls of forward_backward since the last optimizer step
    _rollouts = 0  # completions in them
    _measured: dict[str, float] | None = None  # their metrics

    def forward_backward(
        self, experiences: Sequence[Experience], version: int, recipe: Recipe | None = None
    ) -> dict[str, float]:
        """Adds the gradients of a batch's loss to those since the last optimizer step; weights do not change.

        Sets each experience's `advantage`, `trainer_logprobs` and `entropy`. Returns loss and loss/<term> (0 and none
        where nothing has a gradient), tokens (action tokens), and the token metrics of `step`. The loss of every call
        has its own denominators, and gradients are added as they are.

        Args:
            version: of the current weights.
            recipe: another loss than the trainer's own.

        Raises:
            TrainingError: the recipe needs a model that this trainer has not; a loss is not finite, and all gradients
                since the last optimizer step are discarded.
        """
        with self._using(recipe or self.recipe):
            metrics = TokenMetrics(self.recipe, self._ranks)
            learned = self._prepare(experiences, version, None)
            everything = [*range(len(experiences))]
            batch = learned.mini_batch(everything, self.recipe, self.coefficients, self.steps, self._generator)
            totals: dict[str, float] = {}
            try:
                with self._ready():
                    if not self._critic_only:
                        totals |= self._updates.forward_backward(batch, metrics, first_pass=True)
                    if self._critic is not None and learned.advantages.returns is not None:
                        totals |= self._critic.forward_backward(batch, learned.advantages, learned.scores)
            except BaseException:
                self.discard()
                raise
            learned.set_token_details(metrics.token_details(learned.tokens, self.device))
            found = metrics.result() | learned.value_metrics() | self.coefficients.metrics(self.steps)
        self._gradients += 1
        self._measured = {**(self._measured or {}), **found}
        self._rollouts += sum(each.source is ExperienceSource.ROLLOUT for each in experiences)
        return {"loss": 0.0, **totals, **found, "tokens": float(learned.tokens)}

    def optim_step(self, settings: AdamSettings | None = None) -> dict[str, float]:
        """Takes one optimizer step with the gradients since the last one, and counts a training step.

        Args:
            settings: of this step, in place of the trainer's own settings and schedule.

        Returns grad_norm (before clipping), lr, and skipped: 1 if nothing had a gradient, so that no weight changed.

        Raises:
            TrainingError: there was no forward_backward since the last step; a gradient is not finite. The gradients
                are discarded, and the weights are as before.
        """
        if not self._gradients:
            raise TrainingError(
                "optim_step: no gradients since the last optimizer step; call forward_backward(batch) first"
            )
        if self.recipe.reset_optimizer:
            self._optimizer.state.clear()
        if settings is None:
            lr, most = self._set_learning_rate(), self.config.max_grad_norm
        else:
            lr, most = settings.lr, settings.max_grad_norm
            for group in self._optimizer.param_groups:
                group.update(settings.options())
        try:
            found = self._updates.step(most)
            if self._critic is not None:
                found |= self._critic.step()
            measured, rollouts = self._measured or {}, self._rollouts
        finally:
            self.discard()
        self._end_step(measured, rollouts)
        return {"grad_norm": 0.0, "skipped": 0.0, **found, "lr": lr}

    def discard(self) -> None:
        """Forgets the gradients since the last optimizer step."""
        self._updates.discard()
        if self._critic is not None:
            self._critic.discard()
        self._gradients, self._rollouts, self._measured = 0, 0, None

    def logprobs(self, experiences: Sequence[Experience]) -> list[FloatArray]:
        """Returns the policy's log-probs of each experience's action tokens, 0 for other tokens.

        Float32 [T] each, or as its `targets`.
        """
        scored = [replace(each, source=ExperienceSource.ROLLOUT) for each in experiences]
        table = build_token_table(scored, self.device)
        values = self._inference.logprobs(scored, table).cpu().numpy()
        return [table.place(i, each, values[table.offsets[i] : table.offsets[i + 1]]) for i, each in enumerate(scored)]

    @contextmanager
    def _using(self, recipe: Recipe) -> Iterator[None]:
        """Replaces the trainer's recipe. Raises TrainingError if it needs models that the trainer has not."""
        if recipe is self.recipe:
            yield
            return
        lacking = [
            name
            for name, lacks in (
                ("a reference model", self._reference is None and (recipe.uses_reference or recipe.uses_kto_baseline)),
                ("a critic", self._critic is None and recipe.critic is not None),
                ("a teacher", recipe.distill is not None),
            )
            if lacks
        ]
        if lacking:
            raise TrainingError(
                f"the loss `{recipe.name}` needs {lacking[0]}, which is made with the policy only; give it as the "
                "policy's own algorithm"
            )
        before = self.recipe, self.coefficients
        self.recipe = self._passes.recipe = recipe
        self.coefficients = LossCoefficients(recipe)
        try:
            yield
        finally:
            self.recipe, self.coefficients = before
            self._passes.recipe = before[0]
