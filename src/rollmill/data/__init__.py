"""Tasksets: read rows, build and prepare tasks, sample them, and encode prompts."""

from rollmill.data.encoding import (
    demonstration_experience,
    encode_demonstration,
    encode_pictures,
    encode_privileged_prompt,
    encode_prompt,
    labelled_experience,
    parse_completion,
    preference_pair,
    render_prompt,
)
from rollmill.data.samplers import Sampler, build_sampler
from rollmill.data.taskset import RejectedRow, Taskset, load_taskset

__all__ = [
    "RejectedRow",
    "Sampler",
    "Taskset",
    "build_sampler",
    "demonstration_experience",
    "encode_demonstration",
    "encode_pictures",
    "encode_privileged_prompt",
    "encode_prompt",
    "labelled_experience",
    "load_taskset",
    "parse_completion",
    "preference_pair",
    "render_prompt",
]
