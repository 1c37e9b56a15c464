"""Where experiences wait for the trainer."""

from rollmill.buffer.base import Group, Shelf, Store
from rollmill.buffer.build import open_run, open_store
from rollmill.buffer.experts import ExpertPool
from rollmill.buffer.queue import GroupQueue

__all__ = ["ExpertPool", "Group", "GroupQueue", "Shelf", "Store", "open_run", "open_store"]
