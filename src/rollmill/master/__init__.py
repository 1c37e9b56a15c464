"""Wiring, pacing, evaluation, checkpoints, recovery."""

from rollmill.master.launch import evaluate, resume, run

__all__ = ["evaluate", "resume", "run"]
