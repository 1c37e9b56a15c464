"""Expected gradient of every algorithm against the true policy gradient, by enumeration in float64.

The policy is a table of logits over a letter and an end, for every text of up to seven letters: 9 completions of 1 to 8
tokens. Every group of completions goes through the algorithm's recipe, advantages and denominators, weighted by its
probability. `cosine` is between the expected update and the gradient of the expected reward, `norm_ratio` the ratio of
their lengths: an unbiased algorithm has 1 and 1, one that is unbiased up to a factor has 1 and the factor. One update
per batch, tokens of the current weights, reference equal to the policy. `pass_at_k` is compared with the gradient of
pass@2, without a standard deviation. Algorithms with a critic or a teacher are left out.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.report import Case, finish
from rollmill.algorithms import Recipe, build_recipe
from rollmill.config.algorithms import known_algorithms
from rollmill.config.algorithms.base import AlgorithmOptions, PolicyGradientOptions
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.loss import PrecomputedScores, StepLoss, compute_advantages
from rollmill.types import Experience, ExperienceSource

END = 1
EXACT = ("rloo", "remax", "dr_grpo", "topr", "kimi", "sppo", "pass_at_k")
"""Algorithms with the direction of the true gradient; the factors are in tests/bench/test_gradient.py."""
PAIRS: dict[str, Any] = {
    "advantage": {"k": 2, "baseline": "others", "scale": "none"},
    "aggregation": "sequence-sum-mean",
}
"""Options with which `pass_at_k` is compared with the gradient of pass@2."""
OTHERS: dict[str, dict[str, Any]] = {
    "rloo, token-mean": {"name": "rloo", "aggregation": "token-mean"},
    "rloo, sequence-mean": {"name": "rloo", "aggregation": "sequence-mean"},
}
"""Further rows of the table."""


@dataclass
class Tree:
    """Policy over all completions of up to `longest` tokens: `letters` letters, and an end."""

    letters: int
    longest: int
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        names = range(END + 1, END + 1 + self.letters)
        self.prefixes = [p for n in range(self.longest) for p in itertools.product(names, repeat=n)]
        self.completions = [(*p, END) for p in self.prefixes] + list(itertools.product(names, repeat=self.longest))
        shape = (len(self.prefixes), self.letters + 1)
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        drawn = torch.randint(0, 5, (len(self.completions),), generator=generator)
        self.rewards = [float(value) / 4 for value in drawn]
        [greedy] = [i for i, each in enumerate(self.completions) if self._is_greedy(each)]
        self.greedy_reward = self.rewards[greedy]

    def logprobs(self, completion: tuple[int, ...]) -> Tensor:
        """Log-probs of the completion's tokens."""
        rows = [self.prefixes.index(completion[:t]) for t in range(len(completion))]
        return torch.log_softmax(self.logits[rows], -1)[range(len(rows)), [token - END for token in completion]]

    def distributions(self, completion: tuple[int, ...]) -> Tensor:
        """Log-probs of all tokens at each position, [tokens, vocabulary]."""
        rows = [self.prefixes.index(completion[:t]) for t in range(len(completion))]
        return torch.log_softmax(self.logits[rows], -1).detach()

    def policy_gradient(self, best_of: int = 1) -> Tensor:
        """Gradient of the expected reward, or of the expected best reward of several completions."""
        probability = torch.stack([self.logprobs(each).sum().exp() for each in self.completions])
        expected = torch.zeros((), dtype=torch.float64)
        for chosen in itertools.product(range(len(self.completions)), repeat=best_of):
            expected = expected + probability[list(chosen)].prod() * max(self.rewards[i] for i in chosen)
        return torch.autograd.grad(expected, self.logits)[0]

    def expected_update(self, recipe: Recipe, group_size: int) -> Tensor:
        """Expected update of the logits by gradient descent on the recipe's loss, at learning rate 1."""
        logprobs = [self.logprobs(each) for each in self.completions]
        chances = [float(each.detach().sum().exp()) for each in logprobs]
        total = torch.zeros((), dtype=torch.float64)
        for chosen in itertools.product(range(len(self.completions)), repeat=group_size):
            chance = float(np.prod([chances[i] for i in chosen]))
            total = total + chance * self._loss(recipe, chosen, [logprobs[i] for i in chosen])
        return -torch.autograd.grad(total, self.logits)[0]

    def _loss(self, recipe: Recipe, chosen: tuple[int, ...], logprobs: list[Tensor]) -> Tensor:
        experiences = [self._experience(i, n, logprobs[n]) for n, i in enumerate(chosen)]
        table = build_token_table(experiences, torch.device("cpu"))
        logprob = torch.cat(logprobs)
        own = logprob.detach()
        full = torch.cat([self.distributions(self.completions[i]) for i in chosen])
        p = full.exp()
        entropy, collision = -(p * full).sum(-1), (p * p).sum(-1)
        scores = PrecomputedScores(reference=own, policy=own, collision=collision)
        objective = StepLoss(
            recipe, table, compute_advantages(experiences, table, recipe, scores), scores, [*range(len(chosen))]
        )
        if recipe.needs_step_statistics:
            discriminant = (p * p * (entropy[:, None] + full)).sum(-1)
            objective.choose(own, entropy, discriminant, torch.linspace(0, 1, len(own)))
        loss = torch.zeros((), dtype=torch.float64)
        for micro in build_micro_batches(experiences, table, objective.learned, 10_000, torch.device("cpu")):
            inputs, tokens = objective.inputs(
                micro, logprob[micro.tokens], entropy[micro.tokens], ExperienceSource.ROLLOUT
            )
            for weight, value in objective.terms(inputs, tokens, ExperienceSource.ROLLOUT).values():
                loss = loss + weight * value
        return loss

    def _experience(self, index: int, place: int, logprobs: Tensor) -> Experience:
        completion = self.completions[index]
        tokens = np.array([0, *completion], np.int32)
        return Experience(
            id=f"g-{place}",
            task_id="task",
            group="g",
            token_ids=tokens,
            action_mask=np.arange(len(tokens)) > 0,
            logprobs=np.concatenate([[0], logprobs.detach().numpy()]).astype(np.float32),
            versions=np.zeros(len(tokens), np.int32),
            reward=self.rewards[index],
            reward_parts={"exact": self.rewards[index]},
            greedy_reward=self.greedy_reward,
        )

    def _is_greedy(self, completion: tuple[int, ...]) -> bool:
        best = self.distributions(completion).argmax(-1) + END
        return best.tolist() == list(completion)


def compared(update: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Cosine and ratio of lengths."""
    length = float(update.norm() / gradient.norm())
    return float((update * gradient).sum() / (update.norm() * gradient.norm())) if length else 0.0, length


def enumerable() -> dict[str, AlgorithmOptions]:
    """Algorithms that need only rewards."""
    found: dict[str, AlgorithmOptions] = {}
    for name, section in known_algorithms().items():
        options = section.model_validate({"name": name, **(PAIRS if name == "pass_at_k" else {})})
        if isinstance(options, PolicyGradientOptions) and not options.uses_demonstrations:
            found |= {} if options.advantage.uses_critic else {name: options}
    return found | {name: known_algorithms()[keys["name"]].model_validate(keys) for name, keys in OTHERS.items()}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench gradient", description=__doc__)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--algorithm", action="append", help="only this one (repeatable)")
    args = parser.parse_args(arguments)
    tree, cases = Tree(letters=1, longest=8), []
    gradient, of_pairs = tree.policy_gradient(), tree.policy_gradient(best_of=2)
    for name, options in enumerable().items():
        if args.algorithm and name not in args.algorithm:
            continue
        recipe = build_recipe(options, max_new_tokens=tree.longest, reward_weights={"exact": 1.0})
        aim, words = (of_pairs, "gradient of pass@2") if name == "pass_at_k" else (gradient, "policy gradient")
        cosine, length = compared(tree.expected_update(recipe, args.group_size), aim)
        extra = {"norm_ratio": float(f"{length:.6g}")}
        cases.append(Case(name, words, "cosine", [cosine], [1.0], higher_is_better=True, extra=extra))
        if not only_json:
            print(f"{name:<30} cosine {cosine:.4f}  norm ratio {length:.4f}", flush=True)
    exact = [case for case in cases if case.case in EXACT]
    finish("gradient", cases, headline=exact or None, versions={"torch": torch.__version__}, only_json=only_json)
