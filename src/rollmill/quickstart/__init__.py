"""The quickstart: a task small enough for a laptop CPU, with explanations of what RL does."""
