"""Explorers and trainers in other processes, on this machine or on a cluster."""
