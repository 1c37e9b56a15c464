"""Rewards for the text of a completion: format, language, length, repetition, citations, tool calls."""
