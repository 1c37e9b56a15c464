"""The algorithms, by family: formula, source and defaults, as data, with the parts that only the algorithm has.

Every module of this package is searched for algorithms, advantages, losses and masks: a new one is listed nowhere.
`rollmill algorithms NAME` prints an algorithm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollmill.config.algorithms.base import (
    AdvantageSection,
    AlgorithmOptions,
    LossSection,
    MaskSection,
    PolicyGradientOptions,
)
from rollmill.config.section import (
    SectionT,
    find_sections,
    registered_sections,
    section_tag,
    section_union,
)


def part_sections(base: type[SectionT]) -> list[type[SectionT]]:
    """Returns the built-in parts of algorithms that are a `base`: AdvantageSection, LossSection or MaskSection."""
    return find_sections(__name__, __path__, base)


_algorithms: list[type[AlgorithmOptions]] = find_sections(__name__, __path__, AlgorithmOptions)
_parts = {
    "AdvantageConfig": section_union(part_sections(AdvantageSection), kind="advantage"),
    "LossConfig": section_union(part_sections(LossSection), kind="loss"),
    "MaskConfig": section_union(part_sections(MaskSection)),
}
_completed: list[type[AlgorithmOptions]] = [PolicyGradientOptions, *_algorithms]
for _each in _completed:  # their annotations name the unions above
    _each.model_rebuild(_types_namespace=_parts)

if TYPE_CHECKING:
    AlgorithmConfig = AlgorithmOptions
else:
    AlgorithmConfig = section_union(_algorithms, kind="algorithm")


def known_algorithms() -> dict[str, type[AlgorithmOptions]]:
    """Returns all algorithms by name: the built-in ones, then those registered by users."""
    every: list[Any] = [*_algorithms, *registered_sections("algorithm")]
    return {section_tag(each): each for each in every}


def __getattr__(name: str) -> Any:
    """Returns the class of a built-in algorithm, such as `GRPO`."""
    for each in _algorithms:
        if each.__name__ == name:
            return each
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
