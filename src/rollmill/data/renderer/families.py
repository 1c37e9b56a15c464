"""Renderers of model families, from the library `renderers` (https://pypi.org/project/renderers, Apache-2.0).

It reads the native replies of today's families, and continues their conversations. A family is never guessed from a
model's name: it is one whose marks are in the vocabulary, and which reads back what the chat template writes.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollmill.data.renderer.argument_types import read_values, with_plain_types
from rollmill.data.renderer.call_formats import call_id, checked_call
from rollmill.types import ParsedReply, ToolCall

log = logging.getLogger(__name__)

_FAMILIES = {
    "<tool_call>": (
        *("qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
        *("glm-5", "glm-5.1", "glm-5.3", "glm-4.5", "laguna-xs.2", "laguna-xs-2.1", "laguna-s-2.1", "laguna-m.1"),
    ),
    "<|python_tag|>": ("llama-3",),
    "<|call|>": ("gpt-oss",),
    "<｜tool▁calls▁begin｜>": ("deepseek-v3", "deepseek-r1"),
    "｜DSML｜": ("deepseek-v4",),
    "<|tool_calls_section_begin|>": ("kimi-k2", "kimi-k2.5"),
    "<minimax:tool_call>": ("minimax-m2",),
    "<|tool_call>": ("gemma4",),
    "<tool_calls:opensource>": ("hy3",),
    "<|message_model|>": ("inkling",),
}
"""The library's names of families, by a token with which they write calls; its renderers check for the other ones."""
_MARK, _SECTION_END = "｜DSML｜", "</｜DSML｜tool_calls>"
"""The text of DeepSeek V4 behind its last call, and the token in it."""
LIBRARY = importlib.util.find_spec("renderers") is not None


class FamilyRenderer:
    """The library's renderer of one family, for one tokenizer."""

    def __init__(self, name: str, tokenizer: Any, switches: Mapping[str, Any]) -> None:
        from renderers import config_from_name, create_renderer, merge_chat_template_kwargs, template_field_names

        config = config_from_name(name)
        known = {key: value for key, value in switches.items() if key in template_field_names(config)}
        self.name, self._tokenizer = name, tokenizer
        self._renderer: Any = (
            _GptOss(tokenizer)
            if name == "gpt-oss"
            else create_renderer(tokenizer, merge_chat_template_kwargs(config, known))
        )

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a turn of the family."""
        return list(self._renderer.get_stop_token_ids())

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Any = None, *, salt: str = ""
    ) -> ParsedReply:
        """Take a turn apart. Malformed and unfinished calls are errors, whose text stays in the content.

        Raises RecursionError and ValueError for values nested too deeply, and numbers of thousands of digits.
        """
        plain = with_plain_types(tools or ()) or None
        found = self._renderer.parse_response(list(token_ids), tools=plain, prompt_ids=list(prompt_ids) or None)
        calls, malformed, content = list[ToolCall](), list[str](), found.content
        for number, each in enumerate(found.tool_calls):
            is_object = isinstance(each.arguments, dict)
            arguments, allowed = read_values(each.arguments, each.name, tools) if is_object else ({}, False)
            read = each.status == "ok" or (each.status == "invalid_json" and arguments and allowed)
            id = each.id or call_id(salt, number, f"{each.raw}{list(token_ids)}")
            call = checked_call(each.name, json.dumps(arguments), id=id) if read and is_object and each.name else ""
            if isinstance(call, ToolCall):
                calls.append(call)
                continue
            status = str(each.status).replace("_", " ") if each.status != "ok" else "its arguments are not an object"
            status = call or status
            malformed.append(f"{status}: {each.raw[:200]}")
            content = f"{content}{each.raw}" if each.raw not in content else content
        ends = [each.token_span[1] for each in found.tool_calls if each.token_span is not None]
        if ends:  # the library drops text behind calls
            behind = [token for token in list(token_ids)[max(ends) :] if token not in self.stop_ids]
            marks = set(self._tokenizer.get_added_vocab().values())
            if self._tokenizer.decode([token for token in behind if token not in marks]).strip():
                text = self._tokenizer.decode(behind, skip_special_tokens=False)
                is_end = _MARK in text and _SECTION_END.startswith(text.strip())  # it may be cut off
                content += "" if is_end or text.strip() in content else text
        finished = found.reasoning_complete is not False
        reasoning = found.reasoning_content if finished else (found.reasoning_content or "")
        return ParsedReply(content, reasoning, calls, malformed, finished)


class _GptOss:
    """gpt-oss without its encoder, whose vocabulary is a download: the library's parser needs the tokenizer only."""

    def __init__(self, tokenizer: Any) -> None:
        names = ("return", "call", "start", "end", "channel", "message", "constrain")
        self._ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
        self._tokenizer = tokenizer

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""
        return [self._ids["return_id"], self._ids["call_id"]]

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> Any:
        """Parse a turn, whose first message's header begins in the prompt."""
        from renderers.parsing import parse_gpt_oss

        header = self._tokenizer.encode("<|start|>assistant", add_special_tokens=False) if prompt_ids else []
        return parse_gpt_oss(self._tokenizer, [*header, *token_ids], **self._ids)


def lacks_library(tokenizer: Any) -> bool:
    """True if the library is not installed, and the tokenizer has a mark of a family that it may know."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return not LIBRARY and any(mark in vocabulary for mark in _FAMILIES)


def families_of(tokenizer: Any, switches: Mapping[str, Any]) -> Iterator[FamilyRenderer]:
    """The library's renderers that may fit a tokenizer, by the marks in its vocabulary; none without the library."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    for mark, names in _FAMILIES.items():
        if mark not in vocabulary:
            continue
        if not LIBRARY:
            log.warning(
                "the model's vocabulary has `%s`, as that of a family whose tool calls and reasoning the library "
                "renderers reads; it is not installed: pip install 'rollmill[chat]'",
                mark,
            )
            return
        for name in names:
            try:
                yield FamilyRenderer(name, tokenizer, switches)
            except (AssertionError, ValueError, ImportError, AttributeError, TypeError) as error:
                log.debug("the renderer %s does not take the tokenizer: %s", name, error)
