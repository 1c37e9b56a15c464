"""How new weights reach the engines."""

from rollmill.sync.in_place import InPlace

__all__ = ["InPlace"]
