"""`pipeline`: operators between explorer and buffer, in order. Each changes, drops or adds experiences."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.operators.base import Measured, OperatorSection, Successes
from rollmill.config.operators.checks import Check, Verify
from rollmill.config.operators.data_juicer import DataJuicer
from rollmill.config.operators.duplicates import Duplicates, NearDuplicates
from rollmill.config.operators.filters import GroupVariance, InvalidReward, LengthFilter, RewardFilter, Truncated
from rollmill.config.operators.shaping import Diversity, LengthShaping, OverlongPenalty, RepetitionPenalty, Scale
from rollmill.config.operators.signals import Priority, SuccessRate
from rollmill.config.operators.synthesis import Demonstrations, GeneratedTests, Pairs, Reflection
from rollmill.config.parts import Chosen, name_alone

OperatorConfig = Annotated[
    SerializeAsAny[
        Annotated[
            RewardFilter
            | LengthFilter
            | GroupVariance
            | InvalidReward
            | Truncated
            | Check
            | Verify
            | Duplicates
            | NearDuplicates
            | LengthShaping
            | OverlongPenalty
            | RepetitionPenalty
            | Diversity
            | Scale
            | Priority
            | SuccessRate
            | Demonstrations
            | Pairs
            | Reflection
            | GeneratedTests
            | DataJuicer,
            Field(discriminator="name"),
        ]
    ],
    WrapValidator(Chosen("pipeline")),
    BeforeValidator(name_alone),
]

__all__ = [
    "Check",
    "DataJuicer",
    "Demonstrations",
    "Diversity",
    "Duplicates",
    "GeneratedTests",
    "GroupVariance",
    "InvalidReward",
    "LengthFilter",
    "LengthShaping",
    "Measured",
    "NearDuplicates",
    "OperatorConfig",
    "OperatorSection",
    "OverlongPenalty",
    "Pairs",
    "Priority",
    "Reflection",
    "RepetitionPenalty",
    "RewardFilter",
    "Scale",
    "SuccessRate",
    "Successes",
    "Truncated",
    "Verify",
]
