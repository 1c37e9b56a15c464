"""Where experiences wait for the trainer."""

from rollmill.buffer.base import ExperienceKind, ExperienceStore, Group
from rollmill.buffer.build import open_run_store, open_store
from rollmill.buffer.experts import DemonstrationPool
from rollmill.buffer.group_queue import GroupQueue

__all__ = [
    "DemonstrationPool",
    "ExperienceKind",
    "ExperienceStore",
    "Group",
    "GroupQueue",
    "open_run_store",
    "open_store",
]
