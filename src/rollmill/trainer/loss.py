"""Advantages of a batch, and the loss of one optimizer step.

The loss is a sum of the recipe's terms over micro-batches, with denominators fixed for the whole optimizer step.

Shapes: N experiences of the batch, A action tokens of the batch, M action tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollmill.algorithms.aggregation import sum_by_sequence
from rollmill.algorithms.corrections import interpolated_proximal
from rollmill.algorithms.kl import get_kl_estimator
from rollmill.algorithms.recipe import AdvantageInputs, LossInputs, LossTerm, MaskInputs, Recipe, TokenAdvantageInputs
from rollmill.algorithms.token_advantages import reward_at_last_token
from rollmill.trainer.batch import MicroBatch, TokenTable
from rollmill.trainer.kto_baseline import KTOBaselineBatch
from rollmill.types import Experience, ExperienceSource, task_domain


@dataclass(frozen=True)
class PrecomputedScores:
    """Log-probs and values computed before the update for all action tokens of the batch: [A]; None: not needed."""

    old: Tensor | None = None  #: log-probs of the policy that the update starts from
    reference: Tensor | None = None  #: log-probs under the reference
    values: Tensor | None = None  #: values of the critic
    policy: Tensor | None = None  #: the policy's own log-probs at the start of the step
    mismatched: KTOBaselineBatch | None = None  #: mismatched pairs for KTO's baseline
    collision: Tensor | None = None  #: the policy's squared probabilities, summed over the vocabulary
    interpolated: bool = False  #: interpolate old log-probs between the rollout's and the policy's


@dataclass(frozen=True)
class BatchAdvantages:
    """Advantages of a batch, computed from its rewards."""

    advantage: Tensor  #: float32 [A]; 0 for demonstrations and pairs
    reward: Tensor  #: float32 [N], NaN where missing
    counted: Tensor  #: bool [N]: counts in the denominators
    sources: list[ExperienceSource]  #: [N]
    domains: list[str]  #: [N], "" without one
    groups: list[str]  #: [N]
    returns: Tensor | None = None  #: float32 [A], targets of the critic


def compute_advantages(
    experiences: Sequence[Experience],
    table: TokenTable,
    recipe: Recipe,
    scores: PrecomputedScores | None = None,
    *,
    kl_coefficient: float = 0.0,
) -> BatchAdvantages:
    """Computes advantages by the recipe's rule and fills in each experience's `advantage` array.

    Args:
        kl_coefficient: weight of the KL penalty subtracted from the reward, if the recipe has one.
    """
    scores, device = scores or PrecomputedScores(), table.target.device
    sources = [e.source for e in experiences]
    domains = find_domains(experiences, recipe)
    rewards = torch.tensor([np.nan if e.reward is None else e.reward for e in experiences], dtype=torch.float64)
    compared = recipe.compares_rewards
    trains_critic = recipe.critic_advantage is not None and ExperienceSource.ROLLOUT in sources
    found = BatchAdvantages(
        advantage=torch.zeros(len(table.target)),
        reward=rewards.float().to(device),
        counted=torch.tensor([not compared or source is not ExperienceSource.ROLLOUT for source in sources]),
        sources=sources,
        domains=domains,
        groups=[e.group for e in experiences],
        returns=torch.zeros(len(table.target)) if trains_critic else None,
    )
    if recipe.teacher_prompts:
        found = replace(found, counted=torch.tensor([e.teacher_prompt is not None for e in experiences]))
    for domain in dict.fromkeys(domains):
        rollouts = [
            i
            for i, (source, of) in enumerate(zip(sources, domains, strict=True))
            if source is ExperienceSource.ROLLOUT and of == domain
        ]
        if rollouts and compared:
            _fill_in(found, experiences, rollouts, rewards, table, recipe.of_domain(domain), scores, kl_coefficient)
    _annotate(experiences, table, found.advantage)
    return replace(
        found,
        advantage=found.advantage.to(device),
        counted=found.counted.to(device),
        returns=None if found.returns is None else found.returns.to(device),
    )


def find_domains(experiences: Sequence[Experience], recipe: Recipe) -> list[str]:
    """Returns the domain of each experience; "" if the recipe has none of that name."""
    if not recipe.domains:
        return [""] * len(experiences)
    names = (task_domain(each.task_id) for each in experiences)
    return [name if name in recipe.domains else "" for name in names]


def _fill_in(
    found: BatchAdvantages,
    experiences: Sequence[Experience],
    rollouts: list[int],
    rewards: Tensor,
    table: TokenTable,
    recipe: Recipe,
    scores: PrecomputedScores,
    kl_coefficient: float,
) -> None:
    """Fills in the advantages of the experiences `rollouts`, which are compared with each other only."""
    index = torch.full((len(experiences),), -1).index_copy_(0, torch.tensor(rollouts), torch.arange(len(rollouts)))
    tokens = (index[table.experience.cpu()] >= 0).nonzero()[:, 0]
    sequence, reward_U = index[table.experience.cpu()[tokens]], rewards[rollouts]
    penalty_A = _penalty(table, recipe, scores, kl_coefficient)[tokens] if recipe.kl_in_reward else None
    if recipe.critic_advantage is not None:
        assert scores.values is not None
        assert found.returns is not None
        reward_A = reward_at_last_token(reward_U, sequence)
        reward_A = reward_A if penalty_A is None else reward_A - penalty_A
        targets = recipe.critic_advantage(scores.values.cpu()[tokens], reward_A, sequence)
        found.advantage[tokens] = targets.advantages.float()
        found.returns[tokens] = targets.returns.float()
        found.counted[rollouts] = ~reward_U.isnan()
        return
    inputs = _reward_inputs([experiences[i] for i in rollouts], reward_U, table.lengths[rollouts])
    if recipe.token_advantage is not None:
        policy, collision = (None if each is None else each.cpu()[tokens] for each in (scores.policy, scores.collision))
        result = recipe.token_advantage(inputs, sequence, TokenAdvantageInputs(penalty_A, policy, collision))
        found.advantage[tokens] = result.values.float()
    else:
        assert recipe.advantage is not None
        if penalty_A is not None:
            inputs = _less(inputs, sum_by_sequence(penalty_A, sequence, len(rollouts)))
        result = recipe.advantage(inputs)
        found.advantage[tokens] = result.values.float()[sequence]
    found.counted[rollouts] = result.counted


def _reward_inputs(experiences: list[Experience], rewards: Tensor, lengths: Tensor) -> AdvantageInputs:
    def number(names: list[object]) -> Tensor:
        known: dict[object, int] = {}
        return torch.tensor([known.setdefault(name, len(known)) for name in names])

    def column(values: list[float | None]) -> Tensor:
        return torch.tensor([np.nan if value is None else value for value in values], dtype=torch.float64)

    parts = dict.fromkeys(name for e in experiences for name in e.reward_parts)
    return AdvantageInputs(
        rewards=rewards,
        groups=number([(e.group, e.role) for e in experiences]),
        lengths=lengths.cpu(),
        episodes=number([(i,) if e.episode is None else e.episode for i, e in enumerate(experiences)]),
        anchors=number([(e.group, e.role) if e.anchor is None else e.anchor for e in experiences]),
        greedy_rewards=column([e.greedy_reward for e in experiences]),
        step_rewards=column([e.reward if e.step_reward is None else e.step_reward for e in experiences]),
        parts={name: column([e.reward_parts.get(name) for e in experiences]) for name in parts},
    )


def _less(inputs: AdvantageInputs, penalty: Tensor) -> AdvantageInputs:
    """Subtracts each experience's penalty [N]: from its step reward its own, from its reward that of its whole
    rollout.
    """
    episodes, index = torch.unique(inputs.episodes, return_inverse=True)
    whole = penalty.new_zeros(len(episodes)).index_add_(0, index, penalty)[index]
    return inputs._replace(rewards=inputs.rewards - whole, step_rewards=inputs.step_rewards - penalty)


def _penalty(table: TokenTable, recipe: Recipe, scores: PrecomputedScores, coefficient: float) -> Tensor:
    """KL penalty to the reference, to subtract from each token's reward: float64 [A]."""
    assert scores.reference is not None
    assert scores.policy is not None
    estimate = get_kl_estimator(recipe.kl.estimator)
    return coefficient * estimate(scores.policy, scores.reference, table.rollout_logprob).double().cpu()


def _annotate(experiences: Sequence[Experience], table: TokenTable, values: Tensor) -> None:
    for i, experience in enumerate(experiences):
        advantage = np.zeros(len(experience.token_ids), np.float32)
        advantage[table.positions[i]] = values[table.offsets[i] : table.offsets[i + 1]].numpy()
        experience.advantage = advantage


class StepLoss:
    """The loss of one optimizer step over the experiences of `part`.

    Args:
        step: training step, for term weights that follow a schedule.
        version: version of the weights at the start of the training step.
        kl_coefficient, entropy_coefficient: current values.
    """

    def __init__(
        self,
        recipe: Recipe,
        table: TokenTable,
        advantages: BatchAdvantages,
        scores: PrecomputedScores,
        part: list[int],
        *,
        step: int = 0,
        version: int = 0,
        kl_coefficient: float = 0.0,
        entropy_coefficient: float = 0.0,
    ) -> None:
        self.recipe, self._table, self._advantages, self._scores = recipe, table, advantages, scores
        self._version, self._groups = version, advantages.groups
        self.mismatched = scores.mismatched
        self.kl_baseline: Tensor | None = None  #: set before the step's first pass, if the recipe needs it
        lengths = torch.zeros_like(table.lengths)
        lengths[part] = table.lengths[part]
        self._kept = torch.ones_like(table.imitated) if recipe.masks else None
        self._selected = None if recipe.selection is None else torch.zeros_like(table.imitated)
        moment = {(True, False): kl_coefficient, (False, True): entropy_coefficient}
        self._terms = [
            WeightedTerm(
                term,
                domain,
                term.weight_at(step) * moment.get((term.is_kl, term.is_adaptive_entropy), 1.0),
                term.aggregate(self._lengths(term, domain, lengths)) * self._group_share(term, domain, lengths),
            )
            for domain in dict.fromkeys(advantages.domains)
            for term in recipe.of_domain(domain).terms
        ]
        self.kinds = [(source, domain) for source in ExperienceSource for domain in dict.fromkeys(advantages.domains)]
        """Sources and domains, whose tokens have terms of their own."""
        rollouts = torch.tensor(
            [source is ExperienceSource.ROLLOUT for source in advantages.sources], device=lengths.device
        )
        #: rollout experiences that count
        self.counted = ((lengths > 0) & advantages.counted & rollouts).nonzero()[:, 0].tolist()
        moves = torch.zeros_like(lengths, dtype=torch.bool)
        moves[table.experience[advantages.advantage != 0]] = True
        learned = torch.zeros_like(moves)
        for each in self._terms:
            if each.weight:
                learned |= (each.shares != 0) & (moves if each.term.uses_advantage else True)
        self.learned = learned.nonzero()[:, 0].tolist()  #: experiences with a gradient

    def choose(self, logprob: Tensor, entropy: Tensor, expected_discriminant: Tensor | None, draw: Tensor) -> None:
        """Applies the recipe's masks and selection to the tokens of the step; `inputs` then carries the result.

        Args:
            logprob, entropy, expected_discriminant: of all tokens of the batch just before the optimizer step, [A];
                only tokens of the experiences `counted` are read.
            draw: uniform random numbers [A], the same on all ranks.
        """
        table, recipe = self._table, self.recipe
        member = torch.zeros_like(table.lengths, dtype=torch.bool)
        member[self.counted] = True
        tokens = member[table.experience].nonzero()[:, 0]
        if not len(tokens):
            return
        rollout, own = table.rollout_logprob[tokens], logprob[tokens]
        old = self._old(own, rollout, self._staleness(tokens, own.dtype), tokens)
        inputs = MaskInputs(
            logprob=own,
            old_logprob=old,
            rollout_logprob=rollout,
            advantage=self._advantages.advantage[tokens],
            entropy=entropy[tokens],
            dropped=torch.zeros_like(tokens, dtype=torch.bool),
            draw=draw[tokens],
            sequence=table.experience[tokens],
            expected_discriminant=None if expected_discriminant is None else expected_discriminant[tokens],
        )
        if recipe.dropped is not None:
            inputs = inputs._replace(dropped=recipe.dropped(inputs))
        if recipe.masks:
            kept = torch.stack([mask(inputs) for mask in recipe.masks]).all(0)
            self._kept = torch.ones_like(table.imitated).index_copy_(0, tokens, kept)
        if recipe.selection is not None:
            self._selected = torch.zeros_like(table.imitated).index_copy_(0, tokens, recipe.selection(inputs))

    def inputs(
        self,
        micro: MicroBatch,
        logprob: Tensor,
        entropy: Tensor,
        source: ExperienceSource,
        divergence: Tensor | None = None,
        domain: str = "",
    ) -> tuple[LossInputs, Tensor]:
        """Returns the loss inputs for the tokens of `source` and `domain` in a micro-batch, and the indices of these
        tokens in the batch.
        """
        among = [each == domain for each in self._advantages.domains]
        table, chosen = self._table, micro.of_source(source, self._advantages.sources, among)
        everything = len(chosen) == len(micro.tokens)
        logprob, entropy = (x if everything else x[chosen] for x in (logprob, entropy))
        tokens = micro.tokens[chosen]
        rollout, reference = table.rollout_logprob[tokens], self._scores.reference
        staleness = self._staleness(tokens, logprob.dtype)
        inputs = LossInputs(
            logprob=logprob,
            old_logprob=self._old(logprob, rollout, staleness, tokens),
            rollout_logprob=rollout,
            advantage=self._advantages.advantage[tokens],
            reward=self._advantages.reward[table.experience[tokens]],
            entropy=entropy,
            reference_logprob=None if reference is None else reference[tokens],
            divergence=None if divergence is None else divergence[chosen],
            kl_baseline=self.kl_baseline,
            staleness=staleness,
            sequence=micro.sequence[chosen],
            group=micro.group[chosen],
            kept=None if self._kept is None else self._kept[tokens],
            selected=None if self._selected is None else self._selected[tokens],
        )
        return inputs, tokens

    def terms(
        self, inputs: LossInputs, tokens: Tensor, source: ExperienceSource, domain: str = ""
    ) -> dict[str, tuple[float, Tensor]]:
        """Weight and value (this micro-batch's share) of every term on `source` and `domain`."""
        experience = self._table.experience[tokens]
        return {
            each.name: (each.weight, torch.dot(each.shares[experience].to(inputs.logprob.dtype), each.term.fn(inputs)))
            for each in self._terms
            if each.term.source is source and each.domain == domain and len(tokens) and each.weight
        }

    @property
    def weights(self) -> list[float]:
        """Weights of the terms, in their order."""
        return [each.weight for each in self._terms]

    def _staleness(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return (self._version - self._table.version[tokens]).clamp(min=0).to(dtype)

    def _old(self, logprob: Tensor, rollout: Tensor, staleness: Tensor, tokens: Tensor) -> Tensor:
        if self._scores.old is not None:
            return self._scores.old[tokens]
        if self._scores.interpolated:
            return interpolated_proximal(logprob, rollout, staleness)
        return logprob.detach()

    def _lengths(self, term: LossTerm, domain: str, lengths: Tensor) -> Tensor:
        """Number of tokens of each experience in a term's denominator, [N]; `lengths` are those of the part."""
        advantages = self._advantages
        members = advantages.counted & self._members(term, domain, lengths.device)
        if term.only_positive:
            accepted = self._table.experience[advantages.advantage > 0]
            lengths = torch.minimum(lengths, torch.bincount(accepted, minlength=len(lengths)))
        return lengths * members

    def _members(self, term: LossTerm, domain: str, device: torch.device) -> Tensor:
        """Experiences that a term is about: bool [N]."""
        kinds = zip(self._advantages.sources, self._advantages.domains, strict=True)
        return torch.tensor([source is term.source and of == domain for source, of in kinds], device=device)

    def _group_share(self, term: LossTerm, domain: str, lengths: Tensor) -> float:
        """Share of a domain's groups in the groups of the part with the term's source; 1 without domains.

        So a domain weighs as much as its share of the tasks, whatever the number and length of its completions.
        """
        if not self.recipe.domains:
            return 1.0
        groups: dict[str, set[str]] = {}
        kinds = zip(lengths.tolist(), self._advantages.sources, self._advantages.domains, self._groups, strict=True)
        for length, source, of, group in kinds:
            if length and source is term.source:
                groups.setdefault(of, set()).add(group)
        total = sum(map(len, groups.values()))
        return len(groups.get(domain, ())) / total if total else 1.0


@dataclass(frozen=True)
class WeightedTerm:
    """A term of the loss in one optimizer step, on the experiences of one domain."""

    term: LossTerm
    domain: str  #: "" without domains
    weight: float
    shares: Tensor  #: [N], factor of each token of an experience

    @property
    def name(self) -> str:
        """The term's name, with the domain in front of it."""
        return f"{self.domain}/{self.term.name}" if self.domain else self.term.name
