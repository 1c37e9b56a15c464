"""Preparations of a process before its own work: standard streams, and quick imports."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
