"""`pipeline`: operators between explorer and buffer, in order. Each changes, drops or adds experiences."""

from __future__ import annotations

from typing import Annotated

from pydantic import SerializeAsAny, WrapValidator

from rollmill.config.operators.base import OperatorSection
from rollmill.config.operators.filters import RewardFilter
from rollmill.config.parts import Chosen

OperatorUnion = RewardFilter

OperatorConfig = Annotated[SerializeAsAny[OperatorUnion], WrapValidator(Chosen("operator"))]

__all__ = ["OperatorConfig", "OperatorSection", "RewardFilter"]
