"""rollmill: reinforcement fine-tuning of language models, from a laptop CPU to a cluster with one run file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.core.registry import reward as reward
    from rollmill.explorer.user import environment as environment
    from rollmill.explorer.user import tool as tool
    from rollmill.explorer.user import workflow as workflow
    from rollmill.master import run as run
    from rollmill.monitor.rollouts import load_experiences as load_experiences
    from rollmill.pipelines.user import operator as operator
    from rollmill.recipes.user import advantage as advantage
    from rollmill.recipes.user import algorithm as algorithm
    from rollmill.recipes.user import loss as loss
    from rollmill.tasks.operators.user import task_operator as task_operator
    from rollmill.tasks.samplers.users import order as order

__version__ = "0.1.0"

_HOMES = {
    "advantage": "rollmill.recipes.user",
    "environment": "rollmill.explorer.user",
    "tool": "rollmill.explorer.user",
    "workflow": "rollmill.explorer.user",
    "algorithm": "rollmill.recipes.user",
    "loss": "rollmill.recipes.user",
    "operator": "rollmill.pipelines.user",
    "order": "rollmill.tasks.samplers.users",
    "reward": "rollmill.core.registry",
    "run": "rollmill.master",
    "task_operator": "rollmill.tasks.operators.user",
    "load_experiences": "rollmill.monitor.rollouts",
}

__all__ = [
    "__version__",
    "advantage",
    "algorithm",
    "environment",
    "load_experiences",
    "loss",
    "operator",
    "order",
    "reward",
    "run",
    "task_operator",
    "tool",
    "workflow",
]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import rollmill` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmill' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
