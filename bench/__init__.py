"""Benchmarks: one file per question, each against a named peer in the same run (`python -m bench NAME`)."""
