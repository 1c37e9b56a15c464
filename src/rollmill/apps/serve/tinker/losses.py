"""The loss functions that tinker's SDK names, as recipes of rollmill's trainer. All are sums over tokens.

`weights` (cross_entropy) or `advantages` of the data are the token advantages, and `logprobs` those of the rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rollmill.algorithms.aggregation import sum_by_sequence
from rollmill.algorithms.recipe import (
    AdvantageInputs,
    AdvantageResult,
    LossInputs,
    LossTerm,
    Recipe,
    TokenAdvantageInputs,
)
from rollmill.apps.serve.tinker.wire import Datum, TinkerRequestError
from rollmill.types import Experience, StopReason

Options = Mapping[str, float | str]
LossFunction = Callable[[LossInputs], Tensor]


def cross_entropy(inputs: LossInputs) -> Tensor:
    """-weight * logprob."""
    return -inputs.advantage * inputs.logprob


def importance_sampling(inputs: LossInputs) -> Tensor:
    """-ratio * advantage."""
    return -_ratio(inputs) * inputs.advantage


def ppo(inputs: LossInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-min(ratio * advantage, clipped ratio * advantage)."""
    ratio = _ratio(inputs)
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * inputs.advantage, clipped * inputs.advantage)


def cispo(inputs: LossInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """-sg(clipped ratio) * advantage * logprob."""
    clipped = _ratio(inputs).detach().clamp(clip_low_threshold, clip_high_threshold)
    return -clipped * inputs.advantage * inputs.logprob


def dro(inputs: LossInputs, *, beta: float = 0.05) -> Tensor:
    """-(advantage * logprob - beta / 2 * log ratio^2), on the tokens with an advantage."""
    change = inputs.logprob - inputs.rollout_logprob
    return torch.where(inputs.advantage == 0, 0, 0.5 * beta * change * change - inputs.advantage * inputs.logprob)


def gspo(inputs: LossInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """As `ppo`, with the geometric mean of the ratios of a datum's tokens with an advantage as the ratio of each."""
    scored = inputs.advantage != 0
    change = torch.where(scored, inputs.logprob - inputs.rollout_logprob, 0)
    counts = sum_by_sequence(scored.to(change.dtype), inputs.sequence).clamp(min=1)
    ratio = torch.exp(sum_by_sequence(change, inputs.sequence) / counts)[inputs.sequence]
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * inputs.advantage, clipped * inputs.advantage)


def _ratio(inputs: LossInputs) -> Tensor:
    return torch.exp(inputs.logprob - inputs.rollout_logprob)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
_REFUSED = {
    "stable_reinforce": "its definition is not published; choose importance_sampling, ppo or cispo",
    "custom": "losses that run on the server are not supported; the SDK computes custom losses on the client instead",
}


def find_loss(name: str, options: Options) -> LossFunction:
    """Find a loss by its name in the SDK. Raises TinkerRequestError if there is none, or an option is not its own."""
    if name in _REFUSED:
        raise TinkerRequestError(f"loss_fn `{name}`: {_REFUSED[name]}")
    function = LOSSES.get(name)
    if function is None:
        raise TinkerRequestError(f"there is no loss_fn `{name}`; this server has {', '.join(LOSSES)}")
    known = function.__kwdefaults__ or {}
    for key, value in options.items():
        if key not in known or isinstance(value, str) or not math.isfinite(value):
            have = ", ".join(known) or "none"
            raise TinkerRequestError(f"loss_fn_config: `{key}` = {value!r} is no option of `{name}`; it has: {have}")
    return partial(function, **options)


def token_weights(name: str, data: Sequence[Datum]) -> Tensor:
    """The weight or advantage of every target token, [A]; without `weights` those of cross_entropy are 1."""
    key = "weights" if name == "cross_entropy" else "advantages"
    found = []
    for number, datum in enumerate(data):
        if key not in datum.inputs and name != "cross_entropy":
            raise TinkerRequestError(f"data[{number}] has no `{key}`, which `{name}` needs")
        targets = datum.inputs["target_tokens"]
        if targets.ndim == 2 and name != "cross_entropy":
            raise TinkerRequestError(f"data[{number}] has several targets per token, which only cross_entropy takes")
        values = datum.inputs.get(key, np.ones(targets.shape, np.float32)).astype(np.float32)
        if not np.isfinite(values).all():
            raise TinkerRequestError(f"data[{number}].{key} has a number that is not finite")
        mask = datum.inputs.get("sequence_ratio_mask")
        if mask is not None and (values != 0).any() and ((mask != 0) != (values != 0)).any():
            text = "names other tokens than those with an advantage, which is not supported"
            raise TinkerRequestError(f"data[{number}].sequence_ratio_mask {text}")
        found.append(values.ravel())
    return torch.from_numpy(np.concatenate(found))


def make_recipe(name: str, loss: LossFunction, weights: Tensor) -> Recipe:
    """Make the recipe of one batch of data with these token weights."""

    def advantage(inputs: AdvantageInputs, _sequence: Tensor, _scores: TokenAdvantageInputs) -> AdvantageResult:
        return AdvantageResult(weights, torch.ones_like(inputs.rewards, dtype=torch.bool))

    def ones(lengths: Tensor) -> Tensor:
        return (lengths > 0).float()

    term = LossTerm(name, loss, ones, uses_advantage=True)
    return Recipe(name, (term,), token_advantage=advantage)


def make_experiences(name: str, data: Sequence[Datum], version: int, vocabulary: int, context: int) -> list[Experience]:
    """Make an experience of every datum, all of whose targets are actions; they have the versions of the weights.

    Raises TinkerRequestError for tokens that the model has not, or that are too many, and for missing log-probs.
    """
    found = []
    for number, datum in enumerate(data):
        where, targets = f"data[{number}]", datum.inputs["target_tokens"]
        length = len(datum.tokens)
        if length > context:
            raise TinkerRequestError(f"{where} has {length} tokens, more than the model's context, {context}")
        for tokens in (datum.tokens, targets):
            if not 0 <= tokens.min() <= tokens.max() < vocabulary:
                raise TinkerRequestError(f"{where} has a token outside of the model's vocabulary of {vocabulary}")
        if name != "cross_entropy" and "logprobs" not in datum.inputs:
            raise TinkerRequestError(f"{where} has no `logprobs`, which `{name}` needs")
        known = datum.inputs.get("logprobs") if targets.ndim == 1 else None
        logprobs = np.zeros(length, np.float32) if known is None else known.astype(np.float32)
        if not np.isfinite(logprobs).all():
            raise TinkerRequestError(f"{where}.logprobs has a number that is not finite")
        found.append(
            Experience(
                id=where,
                task_id=where,
                group=where,
                token_ids=np.append(datum.tokens, targets[-1].ravel()[0]).astype(np.int32),
                targets=np.insert(targets, 0, 0, axis=0).astype(np.int32),
                action_mask=np.arange(length + 1) > 0,
                logprobs=np.insert(logprobs, 0, 0).astype(np.float32),
                versions=np.insert(np.full(length, version), 0, -1).astype(np.int32),
                reward=0.0,
                stop_reason=StopReason.LENGTH,
            )
        )
    return found
