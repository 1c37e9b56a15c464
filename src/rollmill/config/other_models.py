"""`models`: models besides the policy that workflows talk to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.section import Endpoint, Section

_OF_ENDPOINTS = ("model", "api_key_env", "completes", "options", "max_in_flight", "tries", "try_s", "deadline_s")


class AuxiliaryModelConfig(Section):
    """A model that does not learn: give one of path, policy and endpoint."""

    path: Path | None = None
    """A Hugging Face checkpoint folder, which rollmill's own engine decodes."""
    policy: Literal["initial"] | None = None
    """`initial`: a frozen copy of the policy as it is at the start of the stage."""
    endpoint: Endpoint | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    model: str | None = None
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the endpoint's key. The key itself stands in no file and no log."""
    completes: bool = False
    """The endpoint goes on from texts, too (`/completions`), and has a `complete`. Otherwise it only chats."""
    temperature: float = Field(1.0, ge=0)
    """How its replies are sampled, unless the workflow says otherwise."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest reply in tokens, unless the workflow says otherwise."""
    options: dict[str, Any] = {}
    """Further fields of the request's body."""
    max_in_flight: int = Field(32, ge=1)
    """Most requests to the endpoint at the same time."""
    tries: int = Field(8, ge=1)
    """How often a request is sent before it has failed."""
    try_s: float = Field(60.0, gt=0)
    """Longest wait for the answer to one try."""
    deadline_s: float = Field(180.0, gt=0)
    """Longest time for all tries of a request."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("path", "policy", "endpoint") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, policy and endpoint (found {' and '.join(given) or 'none'})")
        if self.endpoint is not None:
            if self.model is None:
                raise ValueError("model: an endpoint needs the name of a model")
            return self
        fields = type(self).model_fields
        for key in _OF_ENDPOINTS:
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is honoured with endpoint, not with {given[0]}; remove it")
        return self
