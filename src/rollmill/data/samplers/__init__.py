"""Samplers choose the next task. Each resumes exactly from its state."""

from rollmill.data.samplers.base import Sampler
from rollmill.data.samplers.custom import TaskView, sampler

__all__ = ["Sampler", "TaskView", "sampler"]
