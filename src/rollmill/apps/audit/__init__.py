"""Checks of tasksets, rewards and environments before training."""

COMMANDS = {"audit": "rollmill.apps.audit.command:command"}
