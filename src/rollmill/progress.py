"""Counts what a run gets done, in memory that survives a fork, so that another process can tell work from a heartbeat.

A supervisor (`supervision/`) forks the process that trains and looks at these counters. They grow where something was
finished: tokens, verdicts, micro-batches, steps. Lost updates of two threads do no harm: only changes count.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

_BYTES = 8


class Progress(IntEnum):
    """Kinds of finished work."""

    TOKENS = 0  #: engine steps, or messages with tokens
    VERDICTS = 1  #: scores of completions
    MICRO_BATCHES = 2  #: forward passes of the trainer, with or without backward pass
    GROUPS = 3  #: groups that left the pipeline, or came from another process
    PHASES = 4  #: parts of the set-up, checkpoints, evaluations


class _State(IntEnum):
    """Values that are shared besides, and do not count as progress."""

    STEP = 5  #: training steps made
    UNCOUNTED = 6  #: depth of `uncounted_work`
    PASSED_ON = 7  #: signals that the supervisor has passed on
    ENDING = 8  #: 1: a supervisor ends the process to start it again


def _shared_numbers() -> memoryview:
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")


_numbers = _shared_numbers()
_received, _counted = 0, 0


def count_progress(kind: Progress, count: int = 1) -> None:
    """Note that some work is done."""
    _numbers[kind] += count


def progress_counters() -> tuple[int, ...]:
    return tuple(_numbers[kind] for kind in Progress)


def has_worked() -> bool:
    """True once tokens, verdicts or micro-batches were made since `reset_progress`."""
    return any(_numbers[kind] for kind in (Progress.TOKENS, Progress.VERDICTS, Progress.MICRO_BATCHES))


def reset_progress() -> None:
    """Begin with 0, before a process that trains is started; what is left of an earlier one still counts elsewhere."""
    global _numbers, _received, _counted
    _numbers, _received, _counted = _shared_numbers(), 0, 0


def reach_step(step: int) -> None:
    """Note how many training steps are made."""
    _numbers[_State.STEP] = step
    count_progress(Progress.PHASES)


def step_reached() -> int:
    """Training steps made."""
    return _numbers[_State.STEP]


@contextmanager
def uncounted_work() -> Iterator[None]:
    """Inside is work without counters, such as loading a model or writing a checkpoint: there, use of the processor and
    of disks counts as progress, too."""
    begin_uncounted_work()
    try:
        yield
    finally:
        end_uncounted_work()


def begin_uncounted_work() -> None:
    """Enter `uncounted_work`."""
    _numbers[_State.UNCOUNTED] += 1


def end_uncounted_work() -> None:
    """Leave `uncounted_work`."""
    _numbers[_State.UNCOUNTED] -= 1
    count_progress(Progress.PHASES)


def does_uncounted_work() -> bool:
    """True inside `uncounted_work`."""
    return _numbers[_State.UNCOUNTED] > 0


def pass_on_signal() -> None:
    """Note that the supervisor passes a signal on, just before it does so."""
    _numbers[_State.PASSED_ON] += 1


def signals_passed_on() -> int:
    """Signals that the supervisor has passed on."""
    return _numbers[_State.PASSED_ON]


def count_signals() -> int:
    """Return how many signals the user has sent since the last call, when this process has received one.

    One that went to the whole group comes twice: once directly, and once passed on by the supervisor, which cannot know
    that. Both are one: the second of them returns 0.
    """
    global _received, _counted
    _received += 1
    passed_on = signals_passed_on()
    before, _counted = _counted, max(_counted, passed_on, _received - passed_on)
    return _counted - before


def end_for_restart() -> None:
    """Note that the process is ended in order to start it again, not by the user."""
    _numbers[_State.ENDING] = 1


def ends_for_restart() -> bool:
    """True after `end_for_restart`."""
    return _numbers[_State.ENDING] == 1
