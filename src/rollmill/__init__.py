"""rollmill: reinforcement fine-tuning of language models, from a laptop CPU to a cluster with one run file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.api.algorithms import *  # noqa: F403  one class per algorithm
    from rollmill.api.evaluation import evaluate as evaluate
    from rollmill.api.functions import grade as grade
    from rollmill.api.functions import resume as resume
    from rollmill.api.trainable_policy import TrainablePolicy as TrainablePolicy
    from rollmill.api.training_run import TrainingRun as TrainingRun
    from rollmill.apps.serve.functions import serve as serve
    from rollmill.data.operators.pipeline import task_operator as task_operator
    from rollmill.data.samplers.custom import order as order
    from rollmill.data.samplers.custom import sampler as sampler
    from rollmill.launch import run as run
    from rollmill.orchestrator.run_control import Callback as Callback
    from rollmill.orchestrator.run_control import RunControl as RunControl
    from rollmill.pipelines.pipeline import operator as operator
    from rollmill.registry import advantage as advantage
    from rollmill.registry import algorithm as algorithm
    from rollmill.registry import engine as engine
    from rollmill.registry import environment as environment
    from rollmill.registry import loss as loss
    from rollmill.registry import reward as reward
    from rollmill.registry import tracker as tracker
    from rollmill.registry import workflow as workflow
    from rollmill.rollout.tools.function_tool import tool as tool
    from rollmill.trackers.rollout_log import load_experiences as load_experiences
    from rollmill.types import Completion as Completion
    from rollmill.types import Experience as Experience
    from rollmill.types import Task as Task

__version__ = "0.1.0"

_HOMES = {
    "Callback": "rollmill.orchestrator.run_control",
    "Completion": "rollmill.types",
    "Experience": "rollmill.types",
    "RunControl": "rollmill.orchestrator.run_control",
    "Task": "rollmill.types",
    "TrainingRun": "rollmill.api.training_run",
    "TrainablePolicy": "rollmill.api.trainable_policy",
    "advantage": "rollmill.registry",
    "engine": "rollmill.registry",
    "environment": "rollmill.registry",
    "tool": "rollmill.rollout.tools.function_tool",
    "tracker": "rollmill.registry",
    "workflow": "rollmill.registry",
    "algorithm": "rollmill.registry",
    "loss": "rollmill.registry",
    "operator": "rollmill.pipelines.pipeline",
    "order": "rollmill.data.samplers.custom",
    "sampler": "rollmill.data.samplers.custom",
    "reward": "rollmill.registry",
    "evaluate": "rollmill.api.evaluation",
    "grade": "rollmill.api.functions",
    "resume": "rollmill.api.functions",
    "run": "rollmill.launch",
    "task_operator": "rollmill.data.operators.pipeline",
    "load_experiences": "rollmill.trackers.rollout_log",
}

__all__ = [
    "Callback",
    "Completion",
    "Experience",
    "RunControl",
    "Task",
    "TrainablePolicy",
    "TrainingRun",
    "__version__",
    "advantage",
    "algorithm",
    "engine",
    "environment",
    "evaluate",
    "grade",
    "load_experiences",
    "loss",
    "operator",
    "order",
    "resume",
    "reward",
    "run",
    "sampler",
    "serve",
    "task_operator",
    "tool",
    "tracker",
    "workflow",
]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import rollmill` stays quick; with those of the algorithms."""
    if name in _HOMES:
        from rollmill.startup import quick_imports

        with quick_imports():
            return getattr(import_module(_HOMES[name]), name)
    if name in __all__:  # of an application
        from rollmill.plugins import find_application

        if (function := find_application("FUNCTIONS", name)) is not None:
            return function
    if name[:1].isupper() and name in (found := import_module("rollmill.api.algorithms").algorithm_classes()):
        return found[name]
    raise AttributeError(f"module 'rollmill' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, *import_module("rollmill.api.algorithms").algorithm_classes()]
