"""Correctness and speed of rollmill_grading beside math-verify: `python -m grading_bench`."""
