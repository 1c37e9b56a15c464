"""Feedback of people and programs about a run: acts become experiences in its store. No web library is needed here."""

from rollmill.feedback.desk import Desk, Done, Order
from rollmill.feedback.refused import RefusedError
from rollmill.feedback.requests import parse
from rollmill.feedback.serve import open_desk

__all__ = ["Desk", "Done", "Order", "RefusedError", "open_desk", "parse"]
