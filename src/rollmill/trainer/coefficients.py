"""Weights of the KL penalty and the entropy bonus: fixed, or adapted to a target after every training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.algorithms.entropy import AdaptiveEntropy
from rollmill.algorithms.kl import AdaptiveKL
from rollmill.algorithms.recipe import Recipe


class LossCoefficients:
    """Current weights of a recipe's KL penalty and entropy bonus."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        kl, entropy = recipe.kl, recipe.entropy_control
        self._kl = self._entropy = None
        if kl.target is not None:
            self._kl = AdaptiveKL(kl.coefficient, target=kl.target, horizon=kl.horizon)
        if entropy is not None:
            self._entropy = AdaptiveEntropy(
                recipe.entropy, target=entropy.target, delta=entropy.delta, maximum=entropy.maximum
            )

    @property
    def kl(self) -> float:
        """Weight of the KL penalty."""
        return self._recipe.kl.coefficient if self._kl is None else self._kl.coefficient

    @property
    def entropy(self) -> float:
        """Weight of the entropy bonus."""
        return self._recipe.entropy if self._entropy is None else self._entropy.weight

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the weights of a training step that follow a schedule, and those that adapt."""
        found = {f"weight/{t.name}": t.weight_at(step) for t in self._recipe.terms if callable(t.weight)}
        found |= {} if self._kl is None else {"kl_coefficient": self.kl}
        return found if self._entropy is None else found | {"entropy_coefficient": self.entropy}

    def update(self, metrics: Mapping[str, float], rollouts: int) -> None:
        """Adapts the weights after a training step.

        Args:
            metrics: of the step; `kl_ref` and `entropy` are used where present.
            rollouts: number of completions in the step.
        """
        if self._kl is not None and "kl_ref" in metrics:
            self._kl.update(metrics["kl_ref"], rollouts)
        if self._entropy is not None and "entropy" in metrics:
            self._entropy.update(metrics["entropy"])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "kl": None if self._kl is None else self._kl.state_dict(),
            "entropy": None if self._entropy is None else self._entropy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._kl is not None:
            self._kl.load_state_dict(state["kl"])
        if self._entropy is not None:
            self._entropy.load_state_dict(state["entropy"])
