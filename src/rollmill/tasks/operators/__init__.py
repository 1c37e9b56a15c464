"""Operators that prepare tasks when a taskset is loaded."""

from rollmill.tasks.operators.batch import TaskBatch, TaskReport
from rollmill.tasks.operators.user import task_operator

__all__ = ["TaskBatch", "TaskReport", "task_operator"]
