"""Binds algorithm functions to the trainer's inputs by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

import rollmill.algorithms.advantages as advantages
import rollmill.algorithms.corrections as corrections
import rollmill.algorithms.entropy as entropy
import rollmill.algorithms.losses as losses
import rollmill.algorithms.sequence_losses as sequences
import rollmill.algorithms.token_advantages as token_advantages
import rollmill.algorithms.trust_region as trust_region
from rollmill.algorithms.recipe import AdvantageInputs, LossInputs, MaskInputs
from rollmill.config.section import NamedSection
from rollmill.errors import ConfigError

ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": advantages.grpo,
    "mean_baseline": advantages.mean_baseline,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
    "opo": advantages.opo,
    "pass_at_k": advantages.pass_at_k,
    "best_of_group": advantages.best_of_group,
    "remax": advantages.remax,
    "opmd": advantages.opmd,
    "asymre": advantages.asymre,
    "stepwise": token_advantages.stepwise,
    "gigpo": token_advantages.gigpo,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": losses.ppo_clip,
    "gspo": sequences.gspo,
    "gspo_token": sequences.gspo_token,
    "gmpo": sequences.gmpo,
    "vespo": sequences.vespo,
    "surrogate": losses.surrogate,
    "kl_cov": entropy.kl_cov,
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "topr": sequences.topr,
    "opmd": losses.opmd,
    "kimi_mirror": sequences.kimi_mirror,
    "sppo": sequences.sppo,
    "softmax_ppo": losses.softmax_ppo,
    "policy_gradient": losses.policy_gradient,
    "raft": losses.raft,
    "rec": trust_region.rec,
    "dppo_tv": trust_region.dppo_tv,
}
CLIP_INDICATORS: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": losses.clipped,
    "gspo": sequences.gspo_clipped,
    "gspo_token": sequences.gspo_clipped,
    "gmpo": sequences.gmpo_clipped,
    "rec": trust_region.rec_clipped,
    "dppo_tv": trust_region.dppo_masked,
}
MASKS: dict[str, Callable[..., Tensor]] = {
    "high_entropy": entropy.high_entropy,
    "clip_b": entropy.clip_b,
    "clip_v": entropy.clip_v,
    "clip_cov": entropy.clip_cov,
    "second_moment": trust_region.second_moment,
}
SELECTIONS: dict[str, Callable[..., Tensor]] = {"kl_cov": entropy.largest_covariance}
CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "tis": corrections.truncated_importance,
    "sequence_tis": corrections.sequence_truncated_importance,
    "mis": corrections.masked_importance,
    "sequence_mis": corrections.sequence_masked_importance,
    "geometric": corrections.geometric_rejection,
    "k3": corrections.k3_rejection,
    "decoupled": corrections.decoupled_importance,
    "off_policy_mask": corrections.off_policy_sequence_mask,
}


def bind_advantage(part: NamedSection) -> Callable[[AdvantageInputs], Tensor]:
    """Binds the advantage function that the section names to AdvantageInputs."""
    return bind_inputs(part.function or ADVANTAGES[part.name], part, AdvantageInputs._fields)


def bind_loss(part: NamedSection) -> Callable[[LossInputs], Tensor]:
    """Binds the loss function that the section names to LossInputs."""
    return bind_inputs(part.function or LOSSES[part.name], part, LossInputs._fields)


def bind_mask(part: NamedSection) -> Callable[[MaskInputs], Tensor]:
    """Binds the mask that the section names; it returns the tokens to keep."""
    return bind_inputs(MASKS[part.name], part, MaskInputs._fields)


def bind_selection(part: NamedSection) -> Callable[[MaskInputs], Tensor] | None:
    """Binds the loss's selection over a whole optimizer step, if it has one."""
    function = SELECTIONS.get(part.name) if part.function is None else None
    return None if function is None else bind_inputs(function, part, MaskInputs._fields)


def bind_clip_indicator(part: NamedSection) -> Callable[[LossInputs | MaskInputs], Tensor] | None:
    """Binds the function that returns the tokens dropped by the loss, if it has one."""
    function = CLIP_INDICATORS.get(part.name) if part.function is None else None
    return None if function is None else bind_inputs(function, part, LossInputs._fields)


def bind_correction(part: NamedSection) -> Callable[[LossInputs], Tensor]:
    """Binds the off-policy correction that the section names."""
    return bind_inputs(CORRECTIONS[part.name], part, LossInputs._fields)


def bind_inputs(
    function: Callable[..., Tensor], part: NamedSection, fields: tuple[str, ...]
) -> Callable[[Any], Tensor]:
    """Binds `function`, with the section's options, to a named tuple whose fields are its positional parameters.

    A function with a single parameter that is not a field gets the whole tuple.

    Raises:
        ConfigError: one of several parameters is not a field.
    """
    names, accepted = _parameters(function)
    options = {key: value for key, value in part.arguments().items() if key in accepted}
    names = tuple(name for name in names if name not in options)
    if len(names) == 1 and names[0] not in fields:
        return lambda inputs: function(inputs, **options)
    for name in names:
        if name not in fields:
            where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__}"
            advice = f"rename it to one of {', '.join(fields)}, or make it keyword-only with a default: an option"
            raise ConfigError(f"{where}: the parameter `{name}` stands for nothing; {advice}")
    return lambda inputs: function(*(getattr(inputs, name) for name in names), **options)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the parameters without a default, and of all parameters."""
    parameters = inspect.signature(function).parameters.values()
    required = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    return required, frozenset(p.name for p in parameters)
