"""Where experiences wait for the trainer."""

from rollmill.buffer.base import Group, Shelf, Store
from rollmill.buffer.build import open_run, open_store
from rollmill.buffer.queue import GroupQueue

__all__ = ["Group", "GroupQueue", "Shelf", "Store", "open_run", "open_store"]
