"""vLLM as a rollout engine in its own process; `worker` runs there, in the Python that has vLLM."""
