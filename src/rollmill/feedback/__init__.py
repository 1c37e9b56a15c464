"""Feedback of people and programs on a run, stored as experiences. Importing it needs no web library."""

from rollmill.feedback.requests import FeedbackError, parse_request
from rollmill.feedback.server import open_feedback
from rollmill.feedback.service import FeedbackService, SubmitResult, SubmittedRequest

__all__ = ["FeedbackError", "FeedbackService", "SubmitResult", "SubmittedRequest", "open_feedback", "parse_request"]
