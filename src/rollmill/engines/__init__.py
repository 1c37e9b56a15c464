"""Rollout engines: the protocol, and the native engine that decodes with the trainer's own parameters."""
