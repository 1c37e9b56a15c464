"""Environments that workflows act in."""
