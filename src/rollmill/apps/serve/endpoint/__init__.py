"""The recording endpoint: an OpenAI-compatible server whose calls become experiences with exact tokens."""
