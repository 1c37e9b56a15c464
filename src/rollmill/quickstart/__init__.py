"""The first run: a task small enough for a laptop, and a story that shows what RL does."""
