"""Base classes of task orders."""

from __future__ import annotations

from pydantic import Field

from rollmill.config.section import NamedSection


class OrderSection(NamedSection):
    """Base of task orders."""

    skip_uniform: int = Field(0, ge=0)
    """Skip a task for the next N epochs after a group that was all right or all wrong; for orders without epochs, for N
    times as many draws as there are tasks. 0: never."""

    @property
    def uses_success(self) -> bool:
        """True if the order depends on earlier results."""
        return self.skip_uniform > 0


class SuccessRateOrder(OrderSection):
    """Base of orders that track each task's success rate: a prior, updated by its completions, the newest weighing
    most."""

    prior: float = Field(0.5, gt=0, lt=1)
    """Success rate of a task that has not been rolled out."""
    prior_column: str | None = None
    """Column with a prior per task from 0 to 1, such as `success_rate` of `rollmill tasks score`."""
    prior_weight: float = Field(2.0, gt=0)
    """Weight of the prior, in completions."""
    discount: float = Field(0.7, gt=0, le=1)
    """Discount of earlier results each time the task is rolled out again; 1: no discount."""

    @property
    def uses_success(self) -> bool:
        """See OrderSection.uses_success."""
        return True


class CustomOrder(SuccessRateOrder):
    """An order registered by `@rollmill.order`; its other keys are the function's options."""
