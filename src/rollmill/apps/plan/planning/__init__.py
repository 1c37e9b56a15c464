"""Predicts time and memory of a run from short measurements of its stages."""
