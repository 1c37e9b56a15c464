"""`rollmill ui [DIR]`: serve a page that shows the runs in a folder while they go on."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of runs, or one run.")] = Path("runs"),
    port: Annotated[int, typer.Option("--port", help="Port; 0 is any free one.")] = 8770,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. A token is required if others can reach it.")
    ] = "127.0.0.1",
    author: Annotated[
        str | None, typer.Option("--author", metavar="NAME", help="Author of feedback (default: your user name).")
    ] = None,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the runs in a folder in a browser: curves, completions token by token, timelines, comparisons."""
    from rollmill.apps.serve.web import is_loopback, open_listener, server_url
    from rollmill.apps.serve.web.guard import TOKEN_CLIENT, RequestGuard
    from rollmill.apps.serve.web.keys import KeyRing, make_key
    from rollmill.apps.studio.feedback.command import run_until_signal, user_name
    from rollmill.apps.studio.ui.server import open_server

    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    if token is not None:
        print(
            f"warning: other machines can reach {host}, and the traffic is not encrypted; an SSH tunnel to "
            "127.0.0.1 is safer",
            file=sys.stderr,
        )
    keys = None if token is None else KeyRing([make_key(TOKEN_CLIENT, token)])
    with open_server(folder, RequestGuard(host, keys), author or user_name()) as server:
        listener = open_listener(host, port)
        address = f"{server_url(host, listener)}/" + (f"?token={token}" if token else "")
        print(f"runs in {folder}: {address} (Ctrl-C ends)", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)
        run_until_signal(server, listener)
