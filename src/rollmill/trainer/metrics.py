"""Token-level metrics of a training step, summed without gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollmill.algorithms.kl import k1, k3
from rollmill.algorithms.recipe import LossInputs, Recipe
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.mismatch import LogprobMismatch

_GAP = "mismatch"


class TokenMetrics:
    """Means over the tokens seen in one training step."""

    def __init__(self, recipe: Recipe, ranks: RankGroup) -> None:
        self._recipe, self._ranks = recipe, ranks
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._gap_max = self._drift_max = 0.0
        self._seen: list[tuple[Tensor, Tensor]] = []

    def record(self, tokens: Tensor, logprob: Tensor, entropy: Tensor) -> None:
        """Keeps what a first pass predicted for the tokens of a micro-batch, [M] each; see `token_details`."""
        self._seen.append((tokens, torch.stack([logprob.detach().float(), entropy.detach().float()])))

    def token_details(self, count: int, device: torch.device) -> Tensor:
        """Returns log-prob and entropy of all `count` tokens of the batch, [2, A], from the recorded passes of all
        ranks; NaN for tokens that none had."""
        found = torch.zeros((3, count), device=device)
        for tokens, values in self._seen:
            found[:2, tokens] = values
            found[2, tokens] = 1
        *values_2A, seen = self._ranks.add(found)
        return torch.stack(values_2A).masked_fill(seen == 0, math.nan)

    @torch.no_grad()
    def usual(
        self, inputs: LossInputs, fresh: Tensor, *, first_pass: bool, domain: str = "", weight: float = 1.0
    ) -> None:
        """Adds rollout tokens of one domain; `fresh` [tokens] marks those sampled with the current weights.

        Each token counts as `weight` tokens: it stands for others that were not seen.
        """
        ratio = torch.exp(inputs.logprob - inputs.old_logprob)
        self._add("ratio/mean", ratio, weight)
        dropped = self._recipe.of_domain(domain).dropped
        if dropped is not None:
            self._add("ratio/clip_fraction", dropped(inputs).to(ratio.dtype), weight)
        if inputs.kept is not None:
            self._add("ratio/masked_fraction", (~inputs.kept).to(ratio.dtype), weight)
        if inputs.reference_logprob is not None:
            self._add("kl_ref", k3(inputs.logprob, inputs.reference_logprob), weight)
        if not first_pass:
            return
        self._add("entropy", inputs.entropy, weight)
        if domain:
            self._add(f"domain/{domain}/entropy", inputs.entropy, weight)
        policy = inputs.old_logprob if self._recipe.proximal == "recompute" else inputs.logprob  # before any update
        difference = (policy - inputs.rollout_logprob).abs()
        self._add("kl", k3(inputs.rollout_logprob, inputs.logprob), weight)
        self._add("policy_drift/mean", difference, weight)
        self._add("policy_drift/k1", k1(inputs.rollout_logprob, policy), weight)
        self._add(_GAP, difference[fresh], weight)
        self._drift_max = _running_max(self._drift_max, difference)
        self._gap_max = _running_max(self._gap_max, difference[fresh])

    @torch.no_grad()
    def demonstrated(self, inputs: LossInputs) -> None:
        """Adds demonstration tokens of a first pass."""
        self._add("expert_entropy", inputs.entropy)
        if self._recipe.measures is not None:
            for name, values in self._recipe.measures(inputs).items():
                self._add(name, values)

    @property
    def mismatch(self) -> LogprobMismatch:
        """Engine/trainer mismatch of the tokens sampled with the current weights."""
        total, tokens = (self._ranks.merged({_GAP: each.get(_GAP, 0.0)})[_GAP] for each in (self._sums, self._counts))
        return LogprobMismatch(tokens, total, self._ranks.greatest(self._gap_max))

    def result(self) -> dict[str, float]:
        """Returns the means; metrics without tokens are left out."""
        sums, counts = self._ranks.merged(self._sums), self._ranks.merged(self._counts)
        means = {name: total / counts[name] for name, total in sums.items() if counts[name] and name != _GAP}
        if "expert_entropy" in means and "entropy" not in means:
            means["entropy"] = means["expert_entropy"]
        greatest = self._ranks.greatest(self._drift_max)
        return means | ({"policy_drift/max": greatest} if "policy_drift/mean" in means else {})

    def _add(self, name: str, values: Tensor, weight: float = 1.0) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + weight * float(values.sum(dtype=torch.float64))
        self._counts[name] = self._counts.get(name, 0) + weight * len(values)


def _running_max(so_far: float, values: Tensor) -> float:
    return max(so_far, float(values.max())) if len(values) else so_far
