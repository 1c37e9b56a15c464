"""The final answer of a completion: candidates with their evidence, doubts about them, a choice, one way of writing."""
