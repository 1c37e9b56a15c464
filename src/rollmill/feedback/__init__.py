"""Feedback of people and programs about a run: acts become experiences in its store. No web library is needed here."""

from rollmill.feedback.app import open_feedback
from rollmill.feedback.requests import FeedbackError, parse_request
from rollmill.feedback.service import FeedbackService, SubmitResult, SubmittedRequest

__all__ = ["FeedbackError", "FeedbackService", "SubmitResult", "SubmittedRequest", "open_feedback", "parse_request"]
