"""Base class of the operators of `taskset.pipeline`, which stand in `rollmill.data.operators`: they prepare tasks when
these are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rollmill.config.section import NamedSection

if TYPE_CHECKING:
    from rollmill.data.operators.batch import TaskBatch, TaskReader


class TaskOperatorSection(NamedSection):
    """An operator chosen by name: its options, and the call that changes tasks, of a copy of the section."""

    sorts: ClassVar[bool] = False  #: changes the sequence of tasks and nothing else
    keeps_first: ClassVar[bool] = False  #: its result depends on the sequence of tasks

    @property
    def lacks_held_out(self) -> bool:
        """True if it compares with held-out tasks, and does not say which; the stage's are filled in as `against`."""
        return False

    def setup(self, read: TaskReader) -> None:
        """Make the copy ready; `read` reads the tasks of a further section."""

    def __call__(self, batch: TaskBatch) -> None:
        """Drop, change or sort the tasks of a batch. Raises TasksetError if they lack what the operator needs."""
        raise NotImplementedError
