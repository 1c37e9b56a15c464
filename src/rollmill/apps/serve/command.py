"""`rollmill serve`: an OpenAI-compatible endpoint that records sessions and may train on them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollmill.errors import ConfigError
from rollmill.startup import interrupted_by_signals, quick_imports

if TYPE_CHECKING:
    from rollmill.apps.serve.serving import ServerAddress
    from rollmill.apps.serve.web.keys import KeyRing
    from rollmill.supervision.attempt import RunAttempt

KEY_VARIABLE = "ROLLMILL_SERVE_KEY"
PORT, HOST = 8770, "127.0.0.1"
CLIENT = "default"
"""Name of the client with the only key."""
TINKER_CHECKPOINTS = Path("runs/tinker")


_KEY_HELP = f"The API key (default: ${KEY_VARIABLE}, else a new one, which is printed)."
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, a run directory, or a run file.")]
Port = Annotated[int, typer.Option("--port", help="Port; 0 is any free one.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; a key is required if others can reach it.")]
Key = Annotated[str | None, typer.Option("--key", help=_KEY_HELP)]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="Names and keys of several clients (default: $ROLLMILL_API_KEYS)."),
]
NoKey = Annotated[bool, typer.Option("--no-key", help="Serve without a key, to this machine only.")]
Name = Annotated[str | None, typer.Option("--name", help="Model name in responses (default: the folder's).")]
Step = Annotated[int | None, typer.Option("--step", help="Step of a run's checkpoint (default: the newest).")]
Train = Annotated[bool, typer.Option("--train", help="Train on committed sessions (`workflow: live_requests`).")]
Record = Annotated[
    Path | None, typer.Option("--record", metavar="DIR", help="Write committed sessions to DIR/rollouts.")
]
Tinker = Annotated[
    bool, typer.Option("--tinker", help="Serve the interface of the tinker SDK: clients train LoRA adapters.")
]
Bases = Annotated[
    list[str] | None,
    typer.Option(
        "--base",
        metavar="NAME=FOLDER",
        help="With --tinker: a name that clients give, and the model's folder; may be repeated.",
    ),
]
Checkpoints = Annotated[
    Path | None,
    typer.Option("--checkpoints", metavar="DIR", help="With --tinker: for what clients save (default: runs/tinker)."),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"] | None,
    typer.Option("--precision", help="With --tinker: of training and sampling (default: auto, the faster one)."),
]
Out = Annotated[Path | None, typer.Option("--out", help="With --train: the run directory (default: runs/NAME).")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --train: override a key.")]
Requests = Annotated[
    int, typer.Option("--requests", min=1, help="Maximum concurrent requests; more are answered with 429.")
]
Deadline = Annotated[float, typer.Option("--deadline", min=0.1, help="Timeout of a request in seconds.")]
Sessions = Annotated[int, typer.Option("--sessions", min=1, help="Maximum number of open sessions.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Maximum tokens of all open sessions together.")]
Idle = Annotated[float, typer.Option("--idle", min=1, help="Seconds after which an unused session is dropped.")]
Size = Annotated[
    int | None,
    typer.Option("--body", min=1024, help="Maximum request body in bytes (default: 64 per token of the context)."),
]
Connections = Annotated[int, typer.Option("--connections", min=16, help="Maximum number of open connections.")]
RequestRate = Annotated[
    int | None, typer.Option("--requests-per-minute", min=1, help="Limit of each key without one in --keys.")
]
TokenRate = Annotated[
    int | None, typer.Option("--tokens-per-minute", min=1, help="Likewise, of prompts and completions.")
]
Switches = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'; requests may set others.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads (default: 1); without --train.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option("--device", help="Device (default: auto); without --train.")
]


def command(
    model: Model,
    port: Port = PORT,
    host: Host = HOST,
    key: Key = None,
    keys_file: Keys = None,
    no_key: NoKey = False,
    name: Name = None,
    step: Step = None,
    train: Train = False,
    record: Record = None,
    tinker: Tinker = False,
    bases: Bases = None,
    checkpoints: Checkpoints = None,
    precision: Precision = None,
    out: Out = None,
    overrides: Set = None,
    requests: Requests = 256,
    deadline: Deadline = 600.0,
    sessions: Sessions = 2000,
    tokens: Tokens = 20_000_000,
    idle: Idle = 3600.0,
    body: Size = None,
    connections: Connections = 1000,
    requests_per_minute: RequestRate = None,
    tokens_per_minute: TokenRate = None,
    chat_template_kwargs: Switches = None,
    threads: Threads = None,
    device: Device = None,
) -> None:
    """Serve a model through an OpenAI-compatible API; record sessions, and optionally train on them."""
    _check_for_training(train, (record, step, threads, device), (overrides or None, out))
    named = _bases(tinker, model, name, bases)
    _check_for_tinker(tinker, (train or None, record, step, chat_template_kwargs), (bases, checkpoints, precision))
    from rollmill.apps.serve.web import ConnectionLimits, is_loopback, open_listener, server_url

    switches = _switches(chat_template_kwargs)
    keys, new = _keys(key, keys_file, no_key, is_loopback(host), "tml" if tinker else "sk")
    if not is_loopback(host):
        print(f"warning: other machines can reach {host}, and the traffic is not encrypted", file=sys.stderr)
    listener = open_listener(host, port)

    if new is not None:
        print(f"API key, shown once: {new}", flush=True)

    def ready() -> None:
        url = server_url(host, listener)
        shown = f"TINKER_BASE_URL={url}" if tinker else f"{url}/v1"
        print(f"serving {model}: {shown} (Ctrl-C ends)", flush=True)

    def place() -> ServerAddress:
        from rollmill.apps.serve.endpoint.middleware import AccessRules
        from rollmill.apps.serve.endpoint.service import ServiceLimits
        from rollmill.apps.serve.serving import ServerAddress

        limits = ServiceLimits(requests, deadline, sessions, tokens, idle, body, requests_per_minute, tokens_per_minute)
        shown = name or model.absolute().name.removesuffix(".yaml")
        rules = AccessRules(host, keys, ConnectionLimits(connections))
        return ServerAddress(listener, rules, limits, shown, ready, switches)

    if train:
        _train(model, place, overrides or [], out)
        return
    with quick_imports():
        import torch

        from rollmill.apps.serve.serving import serve_checkpoint
        from rollmill.apps.serve.tinker.server import serve_tinker
        from rollmill.trackers.console import print_or_drop

    torch.set_num_threads(threads or 1)
    with interrupted_by_signals():
        if tinker:
            serve_tinker(named, place(), checkpoints or TINKER_CHECKPOINTS, device or "auto", precision or "auto")
        else:
            serve_checkpoint(model, place(), step=step, record=record, device=device or "auto")
    print_or_drop("ended", sys.stderr)  # SIGHUP comes because the terminal is gone


def _train(source: Path, place: Callable[[], ServerAddress], overrides: list[str], out: Path | None) -> None:
    """Serve and train in a supervised child, which inherits the listener: connections wait while it starts again."""
    from rollmill.cli.run import run_supervised
    from rollmill.config.loader import load_supervision

    def train(attempt: RunAttempt | None) -> dict[str, Any]:
        with quick_imports():
            from rollmill.apps.serve.serving import serve_training

        return serve_training(source, place(), overrides=overrides, out=out, attempt=attempt)

    file = source / "config.yaml" if source.is_dir() else source
    if run_supervised(load_supervision(file, overrides, serves=True), train, as_json=False) is None:
        train(None)


def _switches(given: str | None) -> dict[str, Any]:
    """The variables of the chat template. Raises ConfigError if they are not a JSON object, or not variables."""
    from rollmill.data.layouts import switches_of
    from rollmill.data.readers import BadRowError

    try:
        return switches_of(given)
    except BadRowError as error:
        raise ConfigError(f"--chat-template-kwargs: {error}") from error


def _check_for_training(train: bool, without: Sequence[object], only: Sequence[object]) -> None:
    """Check that every given option has an effect. Raises ConfigError."""
    if train and any(each is not None for each in without):
        raise ConfigError(
            "--record, --step, --threads and --device work only without --train: a training run stores its sessions, "
            "resumes from its newest checkpoint, and has the keys `threads` and `device`"
        )
    if not train and any(each is not None for each in only):
        raise ConfigError("--set and --out are honoured only with --train")


def _bases(tinker: bool, model: Path, name: str | None, given: Sequence[str] | None) -> dict[str, Path]:
    """The models of `--tinker` by their names. Raises ConfigError."""
    found = {name or model.absolute().name.removesuffix(".yaml"): model}
    for each in given or ():
        key, equals, folder = each.partition("=")
        if not (key and equals and folder):
            raise ConfigError(f"--base {each}: expected NAME=FOLDER")
        found[key] = Path(folder)
    return found


def _check_for_tinker(tinker: bool, without: Sequence[object], only: Sequence[object]) -> None:
    """Check that every given option has an effect. Raises ConfigError."""
    if tinker and any(each is not None for each in without):
        raise ConfigError("--train, --record, --step and --chat-template-kwargs do not work with --tinker")
    if not tinker and any(each is not None for each in only):
        raise ConfigError("--base, --checkpoints and --precision are honoured only with --tinker")


def _keys(
    given: str | None, file: Path | None, none: bool, loopback: bool, prefix: str
) -> tuple[KeyRing | None, str | None]:
    """Return the keys of clients, None if the server needs none; and the key that was made here, to be shown."""
    from rollmill.apps.serve.web.keys import KEYS_VARIABLE, KeyRing, given_keys, make_key

    if none and (given is not None or file is not None or not loopback):
        raise ConfigError("--no-key is for servers that only this machine reaches, and excludes --key and --keys")
    if none:
        return None, None
    if given is not None and file is not None:
        raise ConfigError("--key and --keys exclude each other; name the client in the file")
    several = None if given is not None else given_keys(file)
    if several is not None:
        if file is None and os.environ.get(KEY_VARIABLE):
            raise ConfigError(f"{KEYS_VARIABLE} and {KEY_VARIABLE} are both set; unset one")
        if file is not None and file.stat().st_mode & 0o077:
            print(f"warning: other users can read the keys in {file}; run `chmod 600 {file}`", file=sys.stderr)
        return several, None
    known = given or os.environ.get(KEY_VARIABLE)
    if known and prefix == "tml" and not known.startswith("tml-"):
        raise ConfigError("--tinker: the tinker SDK takes keys that begin with tml- only; give another key")
    new = None if known else f"{prefix}-{secrets.token_urlsafe(24)}"
    return KeyRing([make_key(CLIENT, known or new or "")]), new
