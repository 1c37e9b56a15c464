"""Helpers of the tests: models, runs, servers, faults and processes."""
