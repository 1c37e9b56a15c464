"""The orchestrator: stages of a run, their training loop and rollout scheduler, evaluation and checkpoints."""
