"""Models: loading checkpoints, making new ones, and the attention hook that engine and trainer share."""
