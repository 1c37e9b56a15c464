"""Tasksets: read rows, build and prepare tasks, sample them, and encode prompts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.data.encoding import demonstration_experience as demonstration_experience
    from rollmill.data.encoding import encode_demonstration as encode_demonstration
    from rollmill.data.encoding import encode_pictures as encode_pictures
    from rollmill.data.encoding import encode_privileged_prompt as encode_privileged_prompt
    from rollmill.data.encoding import encode_prompt as encode_prompt
    from rollmill.data.encoding import labelled_experience as labelled_experience
    from rollmill.data.encoding import parse_completion as parse_completion
    from rollmill.data.encoding import preference_pair as preference_pair
    from rollmill.data.encoding import render_prompt as render_prompt
    from rollmill.data.samplers import Sampler as Sampler
    from rollmill.data.samplers.factory import build_sampler as build_sampler
    from rollmill.data.taskset import RejectedRow as RejectedRow
    from rollmill.data.taskset import Taskset as Taskset
    from rollmill.data.taskset import load_taskset as load_taskset

_HOMES = {
    "RejectedRow": "taskset",
    "Sampler": "samplers",
    "Taskset": "taskset",
    "build_sampler": "samplers.factory",
    "demonstration_experience": "encoding",
    "encode_demonstration": "encoding",
    "encode_pictures": "encoding",
    "encode_privileged_prompt": "encoding",
    "encode_prompt": "encoding",
    "labelled_experience": "encoding",
    "load_taskset": "taskset",
    "parse_completion": "encoding",
    "preference_pair": "encoding",
    "render_prompt": "encoding",
}


def __getattr__(name: str) -> Any:
    """Import the names on first use: the configuration searches this package for components, and needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmill.data' has no attribute '{name}'")
    return getattr(import_module(f"rollmill.data.{_HOMES[name]}"), name)
