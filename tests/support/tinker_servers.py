"""Servers of the tinker interface over toy models, and data for its clients. Needs the package tinker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tinker import types

from rollmill.apps.serve.endpoint.middleware import AccessRules
from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.serving import ServerAddress
from rollmill.apps.serve.tinker.server import TinkerServer
from rollmill.apps.serve.web import open_listener
from rollmill.apps.serve.web.keys import KeyRing, make_key

ANN, BOB, BASE = "tml-ann", "tml-bob", "toys/qwen3"


@contextmanager
def tinker_server(
    bases: Mapping[str, Path], checkpoints: Path, limits: ServiceLimits = ServiceLimits()
) -> Iterator[TinkerServer]:
    """A server with two clients, ANN and BOB."""
    keys = KeyRing([make_key("ann", ANN), make_key("bob", BOB)])
    rules = AccessRules("127.0.0.1", keys)
    place = ServerAddress(open_listener("127.0.0.1", 0), rules, limits, "toys", lambda: None)
    with TinkerServer(bases, place, checkpoints, precision="fp32") as server:
        yield server


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> Any:
    """A datum that predicts each next token."""
    given = {name: list(values) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **given},
    )


def adapter(checkpoints: Path, path: str) -> dict[str, Any]:
    """The weights of a saved checkpoint."""
    return load_file(checkpoints / path.removeprefix("tinker://") / "adapter_model.safetensors")
