"""Rewards for vision-language models share this: their bases, boxes and points, numbers in charts."""
