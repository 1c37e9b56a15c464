"""The Python interface: training runs, evaluation, grading and serving from scripts and notebooks.

It only builds run files and starts what the commands start: `docs/guide/python.md`.
"""
