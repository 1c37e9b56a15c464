"""The error of a request that cannot be served as it is."""

from __future__ import annotations

from rollmill.errors import RollmillError


class TinkerRequestError(RollmillError):
    """A request that its client must change."""
