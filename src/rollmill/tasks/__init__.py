"""Tasksets: reading rows, turning them into tasks, preparing these, their order, and prompts as tokens."""

from rollmill.tasks.render import (
    encode_demonstration,
    encode_privileged,
    encode_prompt,
    expert_experience,
    labelled_completion,
    preference_pair,
    prompt_text,
)
from rollmill.tasks.samplers import Sampler, build_sampler
from rollmill.tasks.taskset import RejectedRow, Taskset, load_taskset

__all__ = [
    "RejectedRow",
    "Sampler",
    "Taskset",
    "build_sampler",
    "encode_demonstration",
    "encode_privileged",
    "encode_prompt",
    "expert_experience",
    "labelled_completion",
    "load_taskset",
    "preference_pair",
    "prompt_text",
]
