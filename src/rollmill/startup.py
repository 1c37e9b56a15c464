"""Quick imports: what a command does before its own work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False


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
