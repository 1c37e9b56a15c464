"""`rollmill feedback RUN`: serve a page and an HTTP API to rate, edit and compare completions."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

TOKEN_VARIABLE = "ROLLMILL_FEEDBACK_TOKEN"
PORT, HOST = 8760, "127.0.0.1"


def command(
    run: Annotated[Path, typer.Argument(help="Run directory; the run may still be running.")],
    port: Annotated[int, typer.Option("--port", help="Port; 0 is any free one.")] = PORT,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. A token is required if others can reach it.")
    ] = HOST,
    author: Annotated[
        str | None,
        typer.Option("--author", metavar="NAME", help="Author of feedback on the page (default: your user name)."),
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option("--keys", metavar="FILE", help="Names and keys of clients, one of which is required.")
    ] = None,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
    export_file: Annotated[
        Path | None,
        typer.Option("--export-label-studio", metavar="FILE", help="Export completions as Label Studio tasks."),
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Export two completions per task, to compare.")] = False,
    step: Annotated[
        list[int] | None, typer.Option("--step", help="Export this step (repeatable; default: the newest).")
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option(
            "--import-label-studio", metavar="FILE", help="Import annotations from Label Studio's JSON export."
        ),
    ] = None,
) -> None:
    """Serve a page where people rate, edit and compare a run's completions, and an HTTP API for programs."""
    if (pairs or step) and export_file is None:
        raise ConfigError("--pairs and --step are honoured only with --export-label-studio")
    if export_file is not None and import_file is not None:
        raise ConfigError("--export-label-studio and --import-label-studio exclude each other")
    if (export_file or import_file) and (author or browser or keys_file or (port, host) != (PORT, HOST)):
        raise ConfigError("--port, --host, --author, --keys and --open are honoured only when the page is served")
    if export_file is not None:
        _export(run, export_file, step or [], pairs)
    elif import_file is not None:
        _import(run, import_file)
    else:
        _serve(run, host, port, author, browser, keys_file)


def _serve(run: Path, host: str, port: int, author: str | None, browser: bool, keys_file: Path | None) -> None:
    from rollmill.apps.serve.web import is_loopback, open_listener, server_url
    from rollmill.apps.serve.web.guard import TOKEN_CLIENT, RequestGuard
    from rollmill.apps.serve.web.keys import KeyRing, given_keys, make_key
    from rollmill.apps.studio.feedback import open_feedback
    from rollmill.apps.studio.feedback.requests import parse_author
    from rollmill.apps.studio.feedback.server import build_server

    name = parse_author(author or user_name())
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not re.fullmatch(r"[A-Za-z0-9._~-]+", token):
        raise ConfigError(f"{TOKEN_VARIABLE} is part of an address: use letters, digits and . _ ~ - only")
    keys = given_keys(keys_file)
    if keys is not None and token is not None:
        raise ConfigError(f"{TOKEN_VARIABLE} and the keys of clients exclude each other; unset one")
    if not is_loopback(host):
        token = None if keys is not None else token or secrets.token_urlsafe(16)
        print(
            f"warning: other machines can reach {host}, and the traffic is not encrypted; an SSH tunnel to "
            "127.0.0.1 is safer",
            file=sys.stderr,
        )
    if token is not None:
        keys = KeyRing([make_key(TOKEN_CLIENT, token)])
    server = build_server(open_feedback(run), RequestGuard(host, keys), name)
    listener = open_listener(host, port)
    address = f"{server_url(host, listener)}/" + (f"?token={token}" if token else "?token=KEY" if keys else "")
    print(f"feedback on {run}: {address} (Ctrl-C ends)", flush=True)
    if browser:
        import webbrowser

        webbrowser.open(address)
    run_until_signal(server, listener)


def _export(run: Path, file: Path, steps: list[int], pairs: bool) -> None:
    from rollmill.apps.studio.feedback.label_studio import export_tasks
    from rollmill.apps.studio.feedback.rollout_index import RolloutIndex

    count = export_tasks(RolloutIndex(run), file, steps=steps, pairs=pairs)
    print(f"wrote {count} tasks to {file}, the labelling configuration to {file.with_suffix('.xml')}")


def _import(run: Path, file: Path) -> None:
    from rollmill.apps.studio.feedback import open_feedback
    from rollmill.apps.studio.feedback.label_studio import import_annotations

    found = import_annotations(open_feedback(run), file)
    print(f"{found.new} new, {found.known} known before, {found.skipped} annotations that say nothing")


def run_until_signal(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP; the caller removes its temporary files then."""
    from rollmill.trackers.console import print_or_drop

    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        print_or_drop("ended", sys.stderr)  # SIGHUP comes because the terminal is gone


def user_name() -> str:
    """The name of this user, the default author of feedback."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "somebody"
