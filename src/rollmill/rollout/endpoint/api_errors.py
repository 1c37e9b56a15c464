"""What a caller of the endpoint did wrong, or what failed, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rollmill.errors import RollmillError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorInfo(BaseModel):
    """What went wrong, and what to do."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Every answer that is not 200."""

    error: ErrorInfo


class ApiError(RollmillError):
    """A request that is not answered. `status` is HTTP's; `code` is what programs tell errors apart by.

    Args:
        param: the field that is wrong.
        retry_s: seconds after which to try again.
    """

    def __init__(
        self, message: str, status: int = 400, *, code: str, param: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_s = status, code, param, retry_s

    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        details = ErrorInfo(message=str(self), type=kind, param=self.param, code=self.code)
        return ErrorResponse(error=details).model_dump()

    def headers(self) -> dict[str, str]:
        """HTTP headers of the answer."""
        found = {"retry-after": str(self.retry_s)} if self.retry_s is not None else {}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})
