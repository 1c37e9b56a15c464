"""What a person or program that gives feedback did wrong."""

from __future__ import annotations

from rollmill.errors import RollmillError


class FeedbackError(RollmillError):
    """An act that cannot be done; the message says why. `status` is what HTTP answers with: 404, 409 or 422."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status
