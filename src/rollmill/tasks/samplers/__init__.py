"""Samplers: which task comes next. Each goes on exactly from its state."""

from rollmill.tasks.samplers.base import Sampler
from rollmill.tasks.samplers.build import build_sampler
from rollmill.tasks.samplers.users import TaskView, order

__all__ = ["Sampler", "TaskView", "build_sampler", "order"]
