"""Rewards for vision-language models: boxes, points, counts, text, charts, tables and questions about images."""
