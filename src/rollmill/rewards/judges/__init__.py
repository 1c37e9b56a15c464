"""Rewards of language models that are asked for a verdict: scores, comparisons, rankings."""
