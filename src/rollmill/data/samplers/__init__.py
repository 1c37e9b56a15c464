"""Samplers: which task comes next. Each goes on exactly from its state."""

from rollmill.data.samplers.base import Sampler
from rollmill.data.samplers.build import build_sampler
from rollmill.data.samplers.custom import TaskView, order

__all__ = ["Sampler", "TaskView", "build_sampler", "order"]
