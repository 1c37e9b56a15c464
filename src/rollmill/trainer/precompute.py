"""Computes reference and old log-probs and values of a batch before its weights change; needs no rewards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn

from rollmill.algorithms.recipe import Recipe
from rollmill.trainer.batch import MicroBatch, TokenTable, build_token_table
from rollmill.trainer.critic import Critic
from rollmill.trainer.distributed.fsdp import call_unsharded
from rollmill.trainer.kto_baseline import KTOBaselineBatch, build_mismatched_experiences
from rollmill.trainer.logprobs import ForwardPasses, compute_vocabulary_sums, use_packed_attention
from rollmill.trainer.loss import PrecomputedScores
from rollmill.trainer.reference import ReferenceModel
from rollmill.types import IMPORTED_FROM, Experience, ExperienceSource

PrecomputeSteps = Generator[None, None, PrecomputedScores]
Result = TypeVar("Result")


class Precomputer:
    """Old and reference log-probs and values of a batch, as far as the recipe needs them.

    Args:
        ready: context that prepares the models for one pass.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: ForwardPasses,
        *,
        reference: ReferenceModel | None,
        critic: Critic | None,
        ready: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model, self._passes = model, passes
        self._reference, self._critic, self._ready = reference, critic, ready
        self._precomputed: tuple[list[tuple[str, bytes]], int, TokenTable, PrecomputedScores] | None = None

    @property
    def _recipe(self) -> Recipe:
        return self._passes.recipe

    def precompute(self, experiences: Sequence[Experience], version: int, device: torch.device) -> Generator[None]:
        """Computes the scores while rewards are pending, with a yield after every pass; `take` returns them.

        Does nothing if they are already computed.
        """
        if self._precomputed is not None and self._precomputed[:2] == (_names(experiences), version):
            return
        table = build_token_table(experiences, device)
        scores = yield from self._scores(experiences, table, version)
        self._precomputed = _names(experiences), version, table, scores

    def take(
        self, experiences: Sequence[Experience], version: int, device: torch.device
    ) -> tuple[TokenTable, PrecomputedScores]:
        """Returns token table and scores of a batch, computing them now unless `precompute` did."""
        precomputed, self._precomputed = self._precomputed, None
        if precomputed is not None and precomputed[:2] == (_names(experiences), version):
            return precomputed[2:]
        table = build_token_table(experiences, device)
        return table, _finished(self._scores(experiences, table, version))

    def logprobs(self, experiences: Sequence[Experience], table: TokenTable) -> Tensor:
        """The policy's log-probs of all action tokens except demonstrations': float32 [A]. Every rank calls this."""
        return _finished(self._evaluated(self._model, experiences, table))

    def _scores(self, experiences: Sequence[Experience], table: TokenTable, version: int) -> PrecomputeSteps:
        """Computes the scores; yields after every forward pass."""
        single = self._passes.config.updates_per_batch * self._passes.config.epochs_per_batch == 1
        fresh = bool((table.version[table.version >= 0] == version).all()) and not _has_imported_rollouts(experiences)
        own = single and (fresh or self._recipe.proximal != "rollout")
        recompute = self._recipe.proximal == "recompute" and not own
        policy, collision = None, None
        if self._recipe.uses_probabilities:
            collision = torch.zeros_like(table.rollout_logprob)
        if recompute or self._recipe.kl_in_reward or collision is not None:
            policy = yield from self._evaluated(self._model, experiences, table, collision)
        old = policy if recompute else None
        if self._recipe.proximal == "rollout" and not own:
            old = table.rollout_logprob
        reference = None
        if self._reference is not None:
            reference = yield from self._evaluated(None, experiences, table)
        mismatched = None
        if self._recipe.uses_kto_baseline:
            others = build_mismatched_experiences(
                experiences, getattr(self._model.config, "max_position_embeddings", None)
            )
            tokens = build_token_table(others, table.target.device)
            mismatched = KTOBaselineBatch(others, tokens, (yield from self._evaluated(None, others, tokens)))
        values = None
        if self._critic is not None:
            rollouts = [i for i, e in enumerate(experiences) if e.source is ExperienceSource.ROLLOUT]
            with self._ready():
                values = self._critic.values(self._passes.rows(experiences, table, rollouts), table)
            yield
        interpolated = self._recipe.proximal == "interpolate" and not own
        return PrecomputedScores(old, reference, values, policy, mismatched, collision, interpolated=interpolated)

    def _evaluated(
        self,
        model: nn.Module | None,
        experiences: Sequence[Experience],
        table: TokenTable,
        collision: Tensor | None = None,
    ) -> Generator[None, None, Tensor]:
        """Log-probs under a model (None: the reference) of all action tokens, 0 for demonstrations': float32 [A].

        Fills in `collision` [A], if given, with sums of the model's squared probabilities.
        """
        result = torch.zeros_like(table.rollout_logprob)
        chosen = [i for i, e in enumerate(experiences) if e.source is not ExperienceSource.EXPERT]
        for micro in self._passes.rows(experiences, table, chosen):
            with torch.no_grad(), self._ready():
                if model is not None:
                    result[micro.tokens] = self._logprobs(model, micro, table, collision, replay=True)
                else:
                    assert self._reference is not None
                    with self._reference.active() as frozen:
                        result[micro.tokens] = self._logprobs(frozen, micro, table)
            yield
        if collision is not None:
            self._passes.ranks.add(collision)
        return self._passes.ranks.add(result)

    def _logprobs(
        self,
        model: nn.Module,
        micro: MicroBatch,
        table: TokenTable,
        collision: Tensor | None = None,
        *,
        replay: bool = False,
    ) -> Tensor:
        """Log-probs of a micro-batch; with `replay` (for the policy) the model uses the experts that the
        rollout chose.
        """

        def predicted() -> Tensor:
            hidden_Td = self._passes.hidden(model, micro)
            if collision is not None:
                chunk = self._passes.config.logprob_chunk
                sums = compute_vocabulary_sums(model, hidden_Td, micro, table, chunk=chunk)
                collision[micro.tokens] = sums.collision.float()
            return self._passes.predict(model, micro, table, hidden_Td)[0].float()

        with use_packed_attention(model, micro, replay=replay):
            return call_unsharded(model, predicted)


def _has_imported_rollouts(experiences: Sequence[Experience]) -> bool:
    """True if another run made some: their versions are its own, so equal numbers do not mean these weights."""
    return any(e.source is ExperienceSource.ROLLOUT and IMPORTED_FROM in e.info for e in experiences)


def _names(experiences: Sequence[Experience]) -> list[tuple[str, bytes]]:
    """Identifies a batch by ids and tokens, since a buffer hands out copies."""
    return [(each.id, each.token_ids.tobytes()) for each in experiences]


def _finished(passes: Generator[None, None, Result]) -> Result:
    while True:
        try:
            next(passes)
        except StopIteration as end:
            result: Result = end.value
            return result
