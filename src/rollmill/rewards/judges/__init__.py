"""Rewards by language models as judges share this: their base, prompts, verdicts, endpoints."""
