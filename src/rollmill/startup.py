"""Preparations of a process before its own work: standard streams, signals, and quick imports."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rollmill.errors import ConfigError

_frozen = False


def open_missing_streams() -> None:
    """Open /dev/null for standard input, output and error where they are closed, as in some daemons and cron jobs.

    Without, Python's streams are None, and the next files to be opened get the numbers 0 to 2, so that subprocesses
    would print into them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # another thread has taken the number, or given a lower one back
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)
            if getattr(sys, f"__{name}__") is None:
                setattr(sys, f"__{name}__", stream)


def require_usable_paths(paths: Iterable[str | Path]) -> None:
    """Raise ConfigError if the current folder is gone, or a path in it has bytes that this process cannot decode.

    Libraries in other languages end the process in a folder that is gone, and take paths in UTF-8 only.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder has been removed; change to one that exists") from None
    for path in map(str, (folder, *paths)):
        try:
            path.encode()
        except UnicodeEncodeError:
            coding = sys.getfilesystemencoding()
            raise ConfigError(
                f"{path!a} cannot be read as {coding}, the encoding of paths here; "
                + ("rename it" if coding == "utf-8" else "set LC_ALL=C.UTF-8, or PYTHONUTF8=1")
            ) from None


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to end; SIGHUP, which a closed terminal sends, is ignored under `nohup`."""
    hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the body as Ctrl-C does, so that it removes its temporary files.

    An event loop or a server that handles Ctrl-C at that time handles them likewise: an exception out of nowhere may be
    lost in its callbacks. After the first of them others are ignored: some systems send both at once. Off the main
    thread, where Python receives no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in ending_signals() if number != signal.SIGINT]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        if not callable(handler := signal.getsignal(signal.SIGINT)):  # ignored in the background of a shell
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch, transformers and what needs them in the body, a quarter faster.

    Modules are made of a million objects that stay. Looking for cycles among them again and again, as the garbage
    collector does while objects are added, takes most of a second and finds nothing. Later collections leave out what
    was there after the first of these imports: they would take half a second every few steps.
    """
    global _frozen
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if not _frozen:  # only once: a notebook may train again and again, and its garbage must not stay
            gc.freeze()
            _frozen = True
