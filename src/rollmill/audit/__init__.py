"""Checks of tasksets, rewards and environments before training."""
