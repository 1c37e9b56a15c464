"""Operators that prepare tasks when a taskset is loaded."""

from rollmill.data.operators.batch import TaskBatch, TaskOperatorReport
from rollmill.data.operators.pipeline import task_operator

__all__ = ["TaskBatch", "TaskOperatorReport", "task_operator"]
