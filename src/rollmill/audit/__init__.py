"""Tests of tasksets, rewards and environments, before money is spent on training with them."""
