"""Predictions of a run before it starts: its time and memory, measured and simulated."""

COMMANDS = {"plan": "rollmill.apps.plan.command:command"}
