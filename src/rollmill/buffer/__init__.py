"""Where experiences wait between the explorer and the trainer."""

from rollmill.buffer.memory import GroupQueue

__all__ = ["GroupQueue"]
