"""`rollmill serve`: an OpenAI-compatible endpoint that records, and may train."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollmill.core.errors import ConfigError

KEY_VARIABLE = "ROLLMILL_SERVE_KEY"
PORT, HOST = 8770, "127.0.0.1"


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, a run directory, or a run file.")],
    port: Annotated[int, typer.Option("--port", help="Port; 0 is any free one.")] = PORT,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others than this machine's need a key.")
    ] = HOST,
    key: Annotated[
        str | None,
        typer.Option("--key", help=f"The API key (default: ${KEY_VARIABLE}, else a new one, which is printed)."),
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Serve without a key, to this machine only.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in answers (default: the folder's).")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint of a run (default: the newest).")] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Learn from the sessions that are committed (`workflow: traffic`).")
    ] = False,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Write committed sessions to DIR/rollouts.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --train: the run directory (default: runs/NAME).")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --train: override a key.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests under way; more are answered with 429.")] = 256,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 600.0,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions that are held.")] = 2000,
    idle: Annotated[float, typer.Option(min=1, help="Seconds after which an unused session is dropped.")] = 3600.0,
    body: Annotated[int, typer.Option(min=1024, help="Longest body in bytes.")] = 8 * 2**20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; with --train the run file's.")] = 1,
) -> None:
    """Serve a model by OpenAI's interface; record sessions, and train on them."""
    if train and (record is not None or step is not None):
        raise ConfigError("--record and --step are honoured without --train: a run keeps what it learns from")
    if not train and (overrides or out is not None):
        raise ConfigError("--set and --out are honoured with --train only")
    from rollmill.explorer.serving.build import Limits
    from rollmill.explorer.serving.front import Rules
    from rollmill.master.serving import Place, serve_checkpoint, serve_training
    from rollmill.master.serving import threads as set_threads
    from rollmill.web.hosts import address_of, is_loopback, listen

    chosen = _key(key, no_key, is_loopback(host))
    if not is_loopback(host):
        print(f"warning: other machines can reach {host}, and what is sent can be read on the way", file=sys.stderr)
    listener = listen(host, port)
    address = f"{address_of(host, listener)}/v1"

    def ready() -> None:
        if chosen is not None and key is None and not os.environ.get(KEY_VARIABLE):
            print(f"API key, shown once: {chosen}", flush=True)
        print(f"serving {model}: {address} (Ctrl-C ends)", flush=True)

    limits = Limits(requests, deadline, sessions, idle, body)
    shown = name or model.absolute().name.removesuffix(".yaml")
    place = Place(listener, Rules(host, chosen, body), limits, shown, ready)
    if train:
        serve_training(model, place, overrides=overrides or [], out=out)
        return
    set_threads(threads)
    serve_checkpoint(model, place, step=step, record=record)
    print("ended", file=sys.stderr)


def _key(given: str | None, none: bool, loopback: bool) -> str | None:
    """The API key; None where there is to be none."""
    if none and (given is not None or not loopback):
        raise ConfigError("--no-key is for servers that only this machine reaches, and excludes --key")
    if none:
        return None
    key = given or os.environ.get(KEY_VARIABLE) or f"sk-{secrets.token_urlsafe(24)}"
    if not re.fullmatch(r"[A-Za-z0-9._~-]+", key):
        raise ConfigError("an API key has letters, digits and . _ ~ - only; what follows a colon names a session")
    return key
