"""Serving as a function: `rollmill.serve`, for models that a script holds."""

from __future__ import annotations

import secrets
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollmill.api.inputs import RunInputs
from rollmill.api.training_run import TrainingRun
from rollmill.apps.serve.endpoint.middleware import AccessRules
from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.serving import ModelServer
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.startup import open_missing_streams


def serve(
    model: Any,
    *,
    tokenizer: Any = None,
    step: int | None = None,
    port: int = 0,
    key: str | None = None,
    name: str | None = None,
    record: str | Path | None = None,
    device: str = "auto",
) -> ModelServer:
    """Serve a model to clients of OpenAI's API, on this machine, from a thread of this process.

    Args:
        model: a run or its directory, a model's folder or hub id, or a loaded transformers model with `tokenizer`.
        step: of a run's checkpoint; default: the newest.
        port: 0 is any free one.
        key: the API key. Default: a new one, in the attribute `key` of the server.
        name: of the model, in responses. Default: that of the folder.
        record: folder for the sessions that clients commit.

    Returns the running server: `url`, `key`, `stop()`; a context manager, which stops it.
    """
    open_missing_streams()
    secret = key or f"sk-{secrets.token_urlsafe(24)}"
    rules = AccessRules("127.0.0.1", KeyRing([make_key("default", secret)]))
    with TemporaryDirectory(prefix="rollmill-serve-") as temporary:
        folder = model.folder if isinstance(model, TrainingRun) else model
        if not (isinstance(folder, str | Path) and Path(folder).exists()):
            folder = RunInputs(Path(temporary)).model(folder, tokenizer)["path"]
        server = ModelServer(
            Path(folder),
            rules,
            ServiceLimits(),
            name or Path(folder).absolute().name,
            port=port,
            step=step,
            record=None if record is None else Path(record),
            device=device,
        )
    server.key = secret
    return server.start()
