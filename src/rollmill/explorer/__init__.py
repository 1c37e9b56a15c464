"""The explorer: tasks in, judged experiences out."""

from rollmill.explorer.explorer import Explorer

__all__ = ["Explorer"]
