"""One class of runs per algorithm, such as `GRPO`, made from the sections of `rollmill.config.algorithms`.

`algorithms.pyi` has their keyword arguments for editors and type checkers; docs/python_api.py writes it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from rollmill.api.training_run import TrainingRun
from rollmill.config.algorithms import known_algorithms


@cache
def algorithm_classes() -> dict[str, type[TrainingRun]]:
    """Returns the classes of the built-in algorithms by name, in the order of `rollmill algorithms`."""
    made: dict[str, type[TrainingRun]] = {}
    for name, section in known_algorithms().items():
        if section.__module__.startswith("rollmill."):
            body = {"algorithm": name, "__doc__": section.__doc__, "__module__": __name__}
            made[section.__name__] = type(section.__name__, (TrainingRun,), body)
    return made


def __getattr__(name: str) -> Any:
    """Returns a class of `algorithm_classes`."""
    if name[:1].isupper() and name in (found := algorithm_classes()):
        return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
