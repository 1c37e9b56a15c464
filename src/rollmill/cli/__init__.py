"""The command line. Imports no torch."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Annotated, Any

import typer

from rollmill import __version__
from rollmill.errors import ConfigError, RollmillError, UserExitError, explain_path_error
from rollmill.plugins import application_commands
from rollmill.startup import interrupted_by_signals, open_missing_streams, require_usable_paths

COMMANDS = {
    "run": "rollmill.cli.run:run",
    "resume": "rollmill.cli.run:resume",
    "check": "rollmill.cli.check:command",
    "init": "rollmill.cli.first_run:init",
    "quickstart": "rollmill.cli.first_run:quickstart",
    "eval": "rollmill.cli.run:evaluate",
    "bench": "rollmill.cli.bench:command",
    "status": "rollmill.cli.status:command",
    "scale": "rollmill.cli.scale:command",
    "show": "rollmill.cli.show:command",
    "grade": "rollmill.cli.grade:command",
    "testcases": "rollmill.cli.testcases:command",
    "algorithms": "rollmill.cli.algorithms:command",
    "explain": "rollmill.cli.explain:command",
    "checkpoints": "rollmill.cli.checkpoints:command",
    "merge": "rollmill.cli.merge:command",
    "export": "rollmill.cli.export:command",
    **application_commands(),
}
"""Command name -> module:function."""
HANDLE_SIGNALS = ("run", "resume", "serve")
"""Commands that end in their own way at SIGTERM and SIGHUP; all others end as at Ctrl-C."""
GROUPS = {
    "buffer": "rollmill.cli.buffer",
    "containers": "rollmill.cli.containers",
    "sandbox": "rollmill.cli.sandbox",
    "tasks": "rollmill.cli.tasks",
}
"""Name of a group of commands -> module with HELP and COMMANDS."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 failure, 2 wrong usage or configuration, 130
    interrupted."""
    open_missing_streams()
    atexit.register(gc.freeze)  # else Python looks for cycles among all objects before it exits: most of a second
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        utf8 = sys.getfilesystemencoding() == "utf-8"
        require_usable_paths(each for each in arguments if not utf8 or os.path.lexists(each))
        gc.disable()  # sections and commands stay, and looking for cycles among them takes a tenth of `check`
        try:
            app = build_app(arguments[0] if arguments else None)
        finally:
            gc.enable()
            if not gc.get_freeze_count():
                gc.freeze()
        app(args=arguments, prog_name="rollmill")
    except ConfigError as error:
        _complain(str(error))
        return error.exit_code
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        return 0 if end.code is None else 1
    raise AssertionError("typer always exits")


def build_app(only: str | None = None) -> typer.Typer:
    """Build the typer application with every command registered, or, if it is one, only the command or group `only`.

    Importing all commands takes most of a second.
    """
    commands = {only: COMMANDS[only]} if only in COMMANDS else {} if only in GROUPS else COMMANDS
    groups = {only: GROUPS[only]} if only in GROUPS else {} if only in COMMANDS else GROUPS
    app = typer.Typer(
        help="Reinforcement fine-tuning of language models.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for name, target in commands.items():
        module, _, function = target.partition(":")
        own_signals = name in HANDLE_SIGNALS
        app.command(name)(handle_errors(getattr(import_module(module), function), own_signals=own_signals))
    for name, module in groups.items():
        group = typer.Typer(help=import_module(module).HELP, no_args_is_help=True, rich_markup_mode=None)
        for inner, command in import_module(module).COMMANDS.items():
            group.command(inner)(handle_errors(command))
        app.add_typer(group, name=name)
    return app


def handle_errors(command: Callable[..., Any], *, own_signals: bool = False) -> Callable[..., Any]:
    """Wrap a command so that user errors are printed as their message alone, with the documented exit codes.

    Args:
        own_signals: it handles SIGTERM and SIGHUP itself.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> Any:
        try:
            try:
                with nullcontext() if own_signals else interrupted_by_signals():
                    return command(*args, **options)
            except SystemExit as error:  # commands never call sys.exit: a user's code did
                raise UserExitError.of(error) from error
        except RollmillError as error:
            if os.environ.get("ROLLMILL_TRACEBACK") == "1":
                traceback.print_exc()
            else:
                _complain(str(error))
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if (text := explain_path_error(error)) is None or os.environ.get("ROLLMILL_TRACEBACK") == "1":
                raise
            _complain(text)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _complain("interrupted")
            raise typer.Exit(130) from None

    return wrapper


def _complain(text: str) -> None:
    with suppress(OSError):  # the exit code counts, though nobody reads this any more
        print(text, file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rollmill {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement fine-tuning of language models."""
