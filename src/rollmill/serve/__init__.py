"""Serving a checkpoint, or a run that trains on the traffic."""
