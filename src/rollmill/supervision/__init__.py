"""Supervision of runs: the process that trains is a child, and starts again after failures that may pass."""
