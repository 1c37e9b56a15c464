"""What each algorithm learns from in the trainer's tests, and plain forward passes to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import RewardModel, SelfDistill, known_algorithms
from rollmill.config.algorithms.base import AlgorithmOptions
from rollmill.config.trainer import TrainerConfig
from rollmill.trainer import RewardTrainer, Trainer
from rollmill.trainer import critic as critic_module
from rollmill.trainer import reward_trainer as scoring_module
from rollmill.trainer import update as update_module
from rollmill.trainer.distributed.fsdp import local_shards
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.types import Experience, ExperienceSource

LIMIT = 24  #: max_new_tokens


def options_of(name: str, **keys: Any) -> AlgorithmOptions:
    """The algorithm's section of a run file."""
    return known_algorithms()[name].model_validate({"name": name, **keys})


def trainer_of(
    model: Any,
    options: AlgorithmOptions,
    *,
    reference: Any = None,
    teacher: Any = None,
    seed: int = 0,
    ranks: RankGroup | None = None,
    reward_weights: Mapping[str, float] | None = None,
    kept_versions: int = 0,
    **config: Any,
) -> Any:
    """A trainer in the model's own precision: of the policy, or for algorithm `reward_model` of scores.

    The head of a critic or scoring model gets weights: one that says 0 would hide its network.
    """
    settings = TrainerConfig(**{"lr": 1e-3, "precision": "fp32", **config})
    if isinstance(options, RewardModel):
        scorer = RewardTrainer(model, options, settings, total_steps=10, seed=seed, ranks=ranks)
        _fill(scorer.model.head.weight)
        return scorer
    recipe = build_recipe(options, max_new_tokens=LIMIT, reward_weights=reward_weights)
    if recipe.distill is not None and not recipe.teacher_prompts and teacher is None:
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.1)
    others: dict[str, Any] = {"reference": reference, "teacher": teacher, "ranks": ranks}
    trainer = Trainer(model, recipe, settings, total_steps=10, seed=seed, kept_versions=kept_versions, **others)
    if trainer._critic is not None:
        _fill(trainer._critic.model.head.weight)
    return trainer


@torch.no_grad()
def _fill(weight: Tensor) -> None:
    (own,) = local_shards([weight])
    own.copy_(torch.linspace(-0.1, 0.1, weight.numel()).to(weight.dtype)[None][: len(own)])


def batch_for(make_batch: Callable[..., list[Experience]], options: AlgorithmOptions, seed: int = 0) -> Any:
    """Rollouts with everything that advantages look at, and the demonstrations or pairs that the algorithm needs."""
    if options.uses_pairs:
        return _preferred(make_batch(seed=seed, groups=5, size=2))
    if options.uses_labels:
        batch = _preferred(make_batch(seed=seed, groups=5, size=2))
        for e in batch:
            e.group = e.id
        return batch
    batch = make_batch(seed=seed, demonstrations=3 if options.uses_demonstrations else 0)
    for e in batch:
        index = int(e.id.rpartition("-")[2])
        e.greedy_reward, e.anchor = 0.25, f"state {index // 2}"
        if _compares_steps(options):
            e.episode = f"{e.group}/{index % 2}"
        e.reward_parts = {"exact": e.reward, "format": float(index == 3)}
        if isinstance(options, SelfDistill) and index != 1:
            e.teacher_prompt = np.arange(2, 5 + 3 * index, dtype=np.int32)
    return batch if options.uses_rollouts else [e for e in batch if e.source is ExperienceSource.EXPERT]


def uneven_batch_for(make_batch: Callable[..., list[Experience]], options: AlgorithmOptions) -> list[Experience]:
    """`batch_for` with rewards of four values, one of them missing, a group of equal ones (g0), and uneven episodes.

    A group's episodes have three, two and one step; the one without a reward has one.
    """
    if not options.uses_rollouts:
        return batch_for(make_batch, options)
    rng = np.random.default_rng(0)
    batch = make_batch(groups=4, size=6, demonstrations=3 if options.uses_demonstrations else 0)
    for e in (e for e in batch if e.source is ExperienceSource.ROLLOUT):
        index, level = int(e.id.rpartition("-")[2]), float(rng.choice([-0.5, 0.0, 0.3, 1.0]))
        e.reward = 0.3 if e.group == "g0" else {0: -0.5, 1: 1.0}.get(index, level)
        e.reward_parts = {"exact": float(e.reward > 0), "format": index % 2 * float(e.group != "g0"), "shown": level}
        e.greedy_reward, e.anchor = 0.25 * int(e.group[1:]), f"state {index % 2}"
        if _compares_steps(options):
            e.episode = f"{e.group}/{'000112'[index]}"
        if e.id == "g2-5":
            e.reward, e.reward_parts = None, {}
    return batch


def _compares_steps(options: AlgorithmOptions) -> bool:
    """Whether experiences are steps of episodes; others count a rollout once, whatever it was cut into."""
    advantage = getattr(options, "advantage", None)
    return advantage is not None and advantage.uses_episodes


def _preferred(batch: list[Experience]) -> list[Experience]:
    for e in batch:
        e.source, e.temperature = ExperienceSource.PREFERENCE, 1.0
        e.logprobs, e.versions = np.zeros_like(e.logprobs), np.full_like(e.versions, -1)
    return batch


def record(model: Any, batch: Sequence[Experience], noise: float, seed: int = 0) -> None:
    """Rollout log-probs near the model's own: off by a common and by a token's own Gaussian step of size `noise`."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        own = padded_logprobs(model, batch)
    for e, logprob in zip(batch, own, strict=True):
        if e.source is ExperienceSource.ROLLOUT:
            steps = noise * (rng.normal() + rng.normal(size=len(logprob)))
            e.logprobs[e.action_mask] = logprob.double().numpy() + steps


def plain_logprobs(model: Any, batch: Sequence[Experience]) -> list[Tensor]:
    """Log-probs of each experience's action tokens by transformers alone, one sequence at a time."""
    return [_picked(model(input_ids=_ids(e)[None], use_cache=False).logits[0], e) for e in batch]


def padded_distributions(model: Any, batch: Sequence[Experience]) -> list[Tensor]:
    """Log-probs of the whole vocabulary at each experience's action tokens, from one padded batch: [tokens, V] each."""
    rows = zip(_padded_logits(model, batch), batch, strict=True)
    return [torch.log_softmax(row[np.flatnonzero(e.action_mask) - 1] / _temperature(e), -1) for row, e in rows]


def padded_logprobs(model: Any, batch: Sequence[Experience]) -> list[Tensor]:
    """`plain_logprobs` from one padded batch, which is ten times as quick."""
    return [_picked(row, e) for row, e in zip(_padded_logits(model, batch), batch, strict=True)]


def _padded_logits(model: Any, batch: Sequence[Experience]) -> Tensor:
    longest = max(len(e.token_ids) for e in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, e in enumerate(batch):
        ids[i, : len(e.token_ids)], mask[i, : len(e.token_ids)] = _ids(e), 1
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits


def _ids(e: Experience) -> Tensor:
    return torch.from_numpy(e.token_ids).long()


def _picked(logits: Tensor, e: Experience) -> Tensor:
    positions = np.flatnonzero(e.action_mask)
    return torch.log_softmax(logits / _temperature(e), -1)[positions - 1, _ids(e)[positions]]


def _temperature(e: Experience) -> float:
    return 1.0 if e.source is ExperienceSource.EXPERT else float(np.float32(e.temperature))


def plain_values(critic: Any, batch: Sequence[Experience]) -> list[Tensor]:
    """A critic's values of the states before each action token, one sequence at a time."""
    found = []
    for e in batch:
        hidden = critic.network(input_ids=_ids(e)[None], use_cache=False).last_hidden_state[0]
        found.append((hidden @ critic.head.weight[0] + critic.head.bias)[np.flatnonzero(e.action_mask) - 1])
    return found


def flat(model: Any) -> Tensor:
    """All weights in one vector; of shards on all ranks together."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def distance(got: Tensor, expected: Tensor) -> float:
    """Relative to `expected`, which must not vanish."""
    assert expected.norm() > 1e-4
    return float((got - expected).norm() / expected.norm())


def gradient(loss: Tensor, model: Any) -> Tensor:
    """By autograd, flat, in the optimizer's order: matrices first."""
    parameters = sorted(model.parameters(), key=lambda p: p.ndim < 2)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def watch_gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    """From now on the gradients of all optimizer steps before clipping: of `policy`, `critic` and `score` model."""
    seen: dict[str, list[Tensor]] = {"policy": [], "critic": [], "score": []}

    def spy(where: Any, name: str) -> None:
        original = where.clip_gradients

        def clip(grads: list[Tensor], norm: float, max_norm: float) -> None:
            seen[name].append(torch.cat([g.flatten() for g in grads]).clone())
            original(grads, norm, max_norm)

        monkeypatch.setattr(where, "clip_gradients", clip)

    spy(update_module, "policy")
    spy(critic_module, "critic")
    spy(scoring_module, "score")
    return seen
