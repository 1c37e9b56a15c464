"""Rewards by language models as judges: scores, comparisons, rankings."""
