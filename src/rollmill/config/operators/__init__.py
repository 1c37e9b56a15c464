"""`pipeline`: operators between explorer and buffer, in order. Each changes, drops or adds experiences."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.operators.base import OperatorSection, RewardOperatorSection, SuccessOperatorSection
from rollmill.config.operators.filters import (
    CheckOperator,
    DataJuicerFilter,
    DuplicatesOperator,
    GroupVarianceFilter,
    InvalidRewardFilter,
    LengthFilter,
    NearDuplicatesOperator,
    RewardFilter,
    TruncationOperator,
    VerifyOperator,
)
from rollmill.config.operators.shaping import (
    DiversityBonus,
    LengthShaping,
    OverlongPenalty,
    RepetitionPenalty,
    ReplayPriority,
    RewardScaling,
    SuccessRateOperator,
)
from rollmill.config.operators.synthesis import (
    DemonstrationOperator,
    GeneratedTestsOperator,
    PreferencePairOperator,
    ReflectionOperator,
)
from rollmill.config.section import RegisteredUnion, expand_name

OperatorConfig = Annotated[
    SerializeAsAny[
        Annotated[
            RewardFilter
            | LengthFilter
            | GroupVarianceFilter
            | InvalidRewardFilter
            | TruncationOperator
            | CheckOperator
            | VerifyOperator
            | DuplicatesOperator
            | NearDuplicatesOperator
            | LengthShaping
            | OverlongPenalty
            | RepetitionPenalty
            | DiversityBonus
            | RewardScaling
            | ReplayPriority
            | SuccessRateOperator
            | DemonstrationOperator
            | PreferencePairOperator
            | ReflectionOperator
            | GeneratedTestsOperator
            | DataJuicerFilter,
            Field(discriminator="name"),
        ]
    ],
    WrapValidator(RegisteredUnion("pipeline")),
    BeforeValidator(expand_name),
]

__all__ = [
    "CheckOperator",
    "DataJuicerFilter",
    "DemonstrationOperator",
    "DiversityBonus",
    "DuplicatesOperator",
    "GeneratedTestsOperator",
    "GroupVarianceFilter",
    "InvalidRewardFilter",
    "LengthFilter",
    "LengthShaping",
    "NearDuplicatesOperator",
    "OperatorConfig",
    "OperatorSection",
    "OverlongPenalty",
    "PreferencePairOperator",
    "ReflectionOperator",
    "RepetitionPenalty",
    "ReplayPriority",
    "RewardFilter",
    "RewardOperatorSection",
    "RewardScaling",
    "SuccessOperatorSection",
    "SuccessRateOperator",
    "TruncationOperator",
    "VerifyOperator",
]
