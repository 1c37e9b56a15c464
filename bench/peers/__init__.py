"""Peers' side of each benchmark, run as subprocesses; does not import rollmill."""
