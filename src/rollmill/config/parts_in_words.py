"""An algorithm in words: its parts with every value, as `rollmill check` and `rollmill algorithms` print them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollmill.config.algorithm import AlgorithmOptions, PolicyGradientOptions
from rollmill.config.section import Section


def format_algorithm_parts(algorithm: AlgorithmOptions) -> Iterator[tuple[str, str]]:
    """(part, its name and values), what is off left out."""
    if not isinstance(algorithm, PolicyGradientOptions):
        values = algorithm.model_dump(mode="json", exclude={"name", "batch"}, exclude_none=True)
        yield "loss", ", ".join(f"{key} {format_value(value)}" for key, value in values.items())
        return
    yield "advantage", _named(algorithm.advantage)
    yield "loss", _named(algorithm.loss)
    yield "aggregation", algorithm.aggregation
    if algorithm.kl.coefficient:
        kl = algorithm.kl
        refreshed = f", to the policy of every {kl.refresh_every} steps" if kl.refresh_every is not None else ""
        steered = f", towards {kl.target:g} nats per token (horizon {kl.horizon})" if kl.target is not None else ""
        yield "kl", f"{kl.coefficient:g} x {kl.estimator} in the {kl.where}{refreshed}{steered}"
    if algorithm.corrections:
        yield "corrections", " x ".join(_named(each) for each in algorithm.corrections)
    if algorithm.masks:
        yield "masks", ", ".join(_named(each) for each in algorithm.masks)
    if algorithm.entropy_control is not None:
        yield "entropy", f"weight from {algorithm.entropy:g} on ({_values(algorithm.entropy_control)})"
    if algorithm.corrections or algorithm.proximal != "auto":
        chosen = "recompute" if algorithm.proximal == "auto" else algorithm.proximal
        yield "old log-probs", f"{chosen} (where they are not the policy's own)"
    if algorithm.advantage.uses_critic:
        yield "critic", _values(algorithm.critic)
    named = {"name", "advantage", "loss", "aggregation", "kl", "corrections", "masks", "proximal", "critic"}
    named |= {"entropy_control"} if algorithm.entropy_control is None else {"entropy_control", "entropy"}
    rest = algorithm.model_dump(mode="json", exclude=named)
    shown = {key: value for key, value in rest.items() if value not in (0, 0.0, False, None)}
    if shown:
        yield "besides", ", ".join(f"{key} {format_value(value)}" for key, value in shown.items())


def format_value(value: Any) -> str:
    """A scalar or list as a run of words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value).replace("\n", "\\n")
    return f"'{text}'" if isinstance(value, str) and (" " in text or not text) else text


def _named(section: Any) -> str:
    values = _values(section)
    return f"{section.name} ({values})" if values else str(section.name)


def _values(section: Section) -> str:
    values = section.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    return ", ".join(f"{key} {format_value(value)}" for key, value in values.items())
