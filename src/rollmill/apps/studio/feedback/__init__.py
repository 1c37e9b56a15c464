"""Feedback of people and programs on a run, stored as experiences. Importing it needs no web library."""

from rollmill.apps.studio.feedback.requests import FeedbackError, parse_request
from rollmill.apps.studio.feedback.server import open_feedback
from rollmill.apps.studio.feedback.service import FeedbackService, SubmitResult, SubmittedRequest

__all__ = ["FeedbackError", "FeedbackService", "SubmitResult", "SubmittedRequest", "open_feedback", "parse_request"]
