"""Builds the sampler of a taskset, of a mixture or of a stage with domains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.config.domains import DomainConfig, MixingConfig
from rollmill.config.samplers import SamplerSection
from rollmill.data.samplers.base import Sampler
from rollmill.data.samplers.builtin.epochs import ShuffledSampler
from rollmill.data.samplers.domains import DomainSampler
from rollmill.data.samplers.mixture import MixtureSampler
from rollmill.data.taskset import MixtureComponent, Taskset

_SEED_STRIDE = 0x9E3779B97F4A7C15  # gives the tasksets of a mixture different random numbers


def build_sampler(
    taskset: Taskset,
    section: SamplerSection,
    seed: int,
    *,
    batch: int,
    observed: bool = True,
    domains: Mapping[str, DomainConfig] | None = None,
    mixing: MixingConfig | None = None,
) -> Sampler:
    """Build the sampler of a taskset.

    Args:
        section: how to choose; a mixture uses the samplers of its tasksets instead.
        seed: seed of all randomness.
        batch: tasks per training step, drawn at once by samplers that depend on success.
        domains, mixing: the sections, if the tasksets of the mixture are domains.
        observed: whether the sampler will observe successes; if not, those that depend on them shuffle.

    Raises:
        TasksetError: the sampler needs a column that tasks lack.
    """
    if taskset.mixed:

        def of_set(part: Taskset, mixed: MixtureComponent, number: int, share: float) -> Sampler:
            of_this = max(1, round(batch * share))
            return build_sampler(part, mixed.sampler, seed + number * _SEED_STRIDE, batch=of_this, observed=observed)

        if domains:
            return DomainSampler(taskset, seed, of_set, domains=domains, mixing=mixing or MixingConfig())
        return MixtureSampler(taskset, seed, of_set)
    if not observed:
        section = section.model_copy(update={"skip_uniform": 0})
        section = ShuffledSampler() if section.uses_success else section
    sampler: Any = section.model_copy()
    sampler.setup(taskset, seed, batch)
    made: Sampler = sampler
    return made
