"""Token-level metrics of a training step, summed without gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rollmill.algorithms.kl import k1, k3
from rollmill.algorithms.recipe import LossInputs, Recipe
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.mismatch import LogprobMismatch

_GAP, _FRESH, _DRIFT = "mismatch", "fresh", "policy_drift/max"
_INNER = {_GAP, _FRESH}  # sums that are no means over all tokens


class TokenMetrics:
    """Means over the tokens seen in one training step."""

    def __init__(self, recipe: Recipe, ranks: RankGroup) -> None:
        self._recipe, self._ranks = recipe, ranks
        # sums stay on the device until somebody asks: reading one makes the host wait
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        self._largest: dict[str, Tensor] = {}
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
        self._compare(_DRIFT, difference)
        gap = torch.where(fresh, difference, 0.0)
        self._compare(_GAP, gap)
        self._add(_GAP, gap, weight)
        self._add(_FRESH, fresh, weight)

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
        own = {name: self._sums[name] for name in (_GAP, _FRESH) if name in self._sums}
        sums = self._ranks.merged(_read(own))
        return LogprobMismatch(sums.get(_FRESH, 0.0), sums.get(_GAP, 0.0), self._greatest(_GAP))

    def result(self) -> dict[str, float]:
        """Returns the means; metrics without tokens are left out."""
        sums, counts = self._ranks.merged(_read(self._sums)), self._ranks.merged(self._counts)
        means = {name: total / counts[name] for name, total in sums.items() if counts[name] and name not in _INNER}
        if "expert_entropy" in means and "entropy" not in means:
            means["entropy"] = means["expert_entropy"]
        greatest = self._greatest(_DRIFT)
        return means | ({_DRIFT: greatest} if "policy_drift/mean" in means else {})

    def _add(self, name: str, values: Tensor, weight: float = 1.0) -> None:
        total = weight * values.sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + weight * len(values)

    def _compare(self, name: str, values: Tensor) -> None:
        """Keeps the largest of non-negative values."""
        if len(values):
            largest = values.max()
            self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest

    def _greatest(self, name: str) -> float:
        """The largest value so far of all ranks, 0 if there is none."""
        return self._ranks.greatest(float(self._largest[name]) if name in self._largest else 0.0)


def _read(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Reads all sums at once."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
