"""Chat templates as models have them, on a toy tokenizer with their control tokens."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.toys import toy_tokenizer

OF_LIBRARY = (
    "qwen2_5", "qwen3", "llama3", "llama3_1", "gemma", "gemma3", "phi3", "deepseek_r1_distill", "glm4moe", "cohere",
)  # fmt: skip
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% endif %}{% endfor %}"
)
OWN = {"chatml": (CHATML, "<|im_end|>"), "mistral": (MISTRAL, "</s>"), "rollmill": (None, "<eos>")}
ENDS = {
    "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>",
    "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>", "phi3": "<|end|>", "glm4moe": "<|user|>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>", "cohere": "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip
NAMES = (*OWN, *OF_LIBRARY)
_CONTROL = re.compile(r"<\|[^|>]{1,30}\|>|<｜[^｜>]{1,30}｜>|<(?:start|end)_of_turn>|</s>")


@cache
def templated(name: str) -> tuple[Any, frozenset[int]]:
    """A tokenizer with the template, and the ids that end a turn."""
    tokenizer = toy_tokenizer()
    template, end = OWN[name] if name in OWN else (_of_library(name), ENDS[name])
    if template is not None:
        control = {*_CONTROL.findall(template), end, "<bos>"}
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(control)})
        tokenizer.bos_token, tokenizer.chat_template = "<bos>", template
        tokenizer.eos_token = end
    return tokenizer, frozenset({tokenizer.convert_tokens_to_ids(end)})


def _of_library(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the real chat templates are those in the package trl, which is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
