"""Errors of grading, and of the processes that grade. Each says what to do."""

from __future__ import annotations


class GradingError(Exception):
    """A reference cannot be used, or a process that grades has failed. An answer of a model never raises it."""


class MissingPintError(GradingError):
    """Two units have to be converted, and pint is not installed."""

    def __init__(self) -> None:
        super().__init__("comparing units needs pint: pip install 'rollmill-grading[units]'")


class GraderProcessLostError(GradingError):
    """Processes died twice in a row on one answer, which a second attempt may not meet: perhaps memory was short."""


class WorkerDiedError(Exception):
    """A process ended by itself, or was killed from outside."""


class FunctionRaisedError(Exception):
    """Raised inside a process for an exception whose traceback the caller should see, too.

    Args:
        text: the whole message for the caller.
        traceback: the traceback, as text.
    """

    def __init__(self, text: str, traceback: str) -> None:
        super().__init__(text, traceback)
        self.text, self.traceback = text, traceback


class RemoteFunctionError(Exception):
    """An exception of a function in another process, with its traceback as text. It is the cause of a GradingError."""

    def __str__(self) -> str:
        return f"in a reward process:\n{self.args[0]}"
