"""vLLM as a rollout engine, in a process of its own; `worker` runs there, in the Python that has vLLM."""
