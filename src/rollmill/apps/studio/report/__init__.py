"""HTML reports of runs and of model comparisons."""
