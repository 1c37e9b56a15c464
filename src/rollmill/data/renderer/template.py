"""A chat template: messages to text, and what the template can show.

Templates are programs that come with a checkpoint, so nothing is assumed about one: each of its features is found by
rendering a small conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta

from rollmill.data.picture_turns import split_references
from rollmill.data.renderer.call_formats import tool_result_message
from rollmill.errors import ChatTemplateError
from rollmill.types import REASONING_END, REASONING_START, ToolCall, split_reasoning

if TYPE_CHECKING:
    from rollmill.data.picture_prompts import PictureProcessor

ChatMessage = Mapping[str, Any]
"""One chat message in OpenAI's format: `role`, `content`, perhaps `reasoning_content`, `tool_calls` and others."""
Switches = Mapping[str, Any]
"""Variables of a chat template, such as `enable_thinking`; `chat_template_kwargs` in vLLM and TRL."""
Tools = Sequence[Mapping[str, Any]] | None
"""Descriptions of tools in OpenAI's format."""

MARK, OTHER_MARK = "rollmillprobe", "rollmillother"
QUESTION = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}
CALL_ID = "abcdefghi"  # nine letters, as Mistral's templates require
_LONG = 16  # characters of a message that no other text has by chance
_NAMED_ID = re.compile(r"functions\..+:\d+")
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""Marks of transformers around the assistant's turns, which Jinja itself does not know."""
_CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


def probe_tool(name: str = MARK) -> dict[str, Any]:
    """Build a description of a tool with arguments of several types."""
    types = {"text": "string", "number": "integer", "flag": "boolean", "nested": "object"}
    parameters = {"type": "object", "properties": {key: {"type": type} for key, type in types.items()}}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


def call_message(calls: Sequence[ToolCall], content: str = "", reasoning: str | None = None) -> dict[str, Any]:
    """Build an assistant's message that calls tools, with arguments as objects."""
    entries = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": entries}
    return message if reasoning is None else message | {"reasoning_content": reasoning}


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        day: the date that templates print which ask for today's; so a resumed run shows what it showed before.
        switches: variables of the template.
    """

    def __init__(self, tokenizer: Any, day: date, switches: Switches | None = None) -> None:
        self.tokenizer, self.day, self.switches = tokenizer, day, dict(switches or {})
        self.processor: PictureProcessor | None = getattr(tokenizer, "picture_processor", None)
        self._texts = dict[bool, str | None]()  # the template with and without tools, where it prints a date
        self._shown = dict[tuple[str, str, bool, bool], bool]()  # by role, role before, being last, and tools

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = None,
        *,
        prompt: bool = True,
    ) -> str:
        """Render messages as text.

        Args:
            prompt: the text ends ready for the policy's turn.

        Raises ChatTemplateError if the template refuses the messages.
        """
        ids = dict[str, str]()
        fitted = [self._fitted(message, ids) for message in messages]
        try:
            return self._applied(fitted, list(tools) if tools else None, prompt)
        except ChatTemplateError:
            raise
        except Exception as error:  # templates are programs: they raise Jinja's errors and Python's
            raise ChatTemplateError(f"the tokenizer's chat template refuses the messages: {error}") from error

    def _applied(self, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
        if self.processor is not None:
            parts = [{**each, "content": content_parts(each.get("content"))} for each in messages]
            options = {"add_generation_prompt": prompt, **self.switches}
            if (dated := self._dated(tools is not None)) is not None:
                options["chat_template"] = dated
            return self.processor.apply_template(parts, self.tokenizer, tools, **options)
        if self._wants_parts:
            messages = [{**each, "content": content_parts(each.get("content"))} for each in messages]
        options = {"add_generation_prompt": prompt, "tokenize": False, **self.switches}
        if (dated := self._dated(tools is not None)) is not None:
            options["chat_template"] = dated
        text: str
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except TypeError:
            if tools is not None:
                raise
            text = self.tokenizer.apply_chat_template(messages, tools=[], **options)  # some count them in any case
        return text

    @cached_property
    def _wants_parts(self) -> bool:
        """True for templates that show content parts and no texts, as of vision-language models."""
        self.__dict__["_wants_parts"] = False
        if self.shows([{"role": "user", "content": MARK}]):
            return False
        self.__dict__["_wants_parts"] = True
        found = self.__dict__["_wants_parts"] = self.shows([{"role": "user", "content": MARK}])
        return found

    def _dated(self, tools: bool) -> str | None:
        """The template with its date written in; None if it prints none."""
        if tools not in self._texts:
            own = getattr(self.processor and self.processor.processor, "chat_template", None)
            source = own or self.tokenizer.get_chat_template(None, [probe_tool()] if tools else None)
            dated = _CLOCK.sub(lambda found: json.dumps(self.day.strftime(found[2])), source)
            self._texts[tools] = None if dated == source else dated
        return self._texts[tools]

    def _fitted(self, message: ChatMessage, ids: dict[str, str]) -> dict[str, Any]:
        """The message with calls in the shape that the template reads.

        Args:
            ids: of earlier calls, and those that the template gets for them.
        """
        fitted = dict(message)
        content = message.get("content")
        tagged = isinstance(content, str) and content.lstrip().startswith(REASONING_START)
        if tagged and "reasoning_content" not in message and message["role"] == "assistant" and self.supports_reasoning:
            reply = split_reasoning(str(content))
            fitted |= {"content": reply.content, "reasoning_content": (reply.reasoning or "").strip("\n")}
            message = fitted
        if "reasoning_content" in message:
            fitted.setdefault("reasoning", message["reasoning_content"])  # the name in some templates
        calls = message.get("tool_calls")
        if not calls:
            fitted.pop("tool_calls", None)
            if message.get("tool_call_id") in ids:
                fitted["tool_call_id"] = ids[message["tool_call_id"]]
            return fitted | {"content": message.get("content") or ""} if "content" in message else fitted
        as_text, none, named = self._call_shape
        entries = []
        for entry in calls:
            function = entry.get("function", entry)
            arguments = function.get("arguments", {})
            if isinstance(arguments, str) and not as_text:
                with suppress(ValueError):  # as a policy may have written it
                    arguments = json.loads(arguments or "{}")
            elif as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            id = entry.get("id") or CALL_ID
            ids[id] = f"functions.{function['name']}:{len(ids)}" if named and not _NAMED_ID.fullmatch(id) else id
            given = {"id": ids[id], "type": "function"}
            entries.append(given | {"function": {"name": function["name"], "arguments": arguments}})
        return fitted | {"content": message.get("content") or (None if none else ""), "tool_calls": entries}

    @cached_property
    def _call_shape(self) -> tuple[bool, bool, bool]:
        """True for what a template wants: arguments as JSON text, null for an empty content, ids with names (as
        Kimi's does)."""
        call = {"id": CALL_ID, "type": "function", "function": {"name": MARK, "arguments": {OTHER_MARK: True}}}
        usual, without = (False, False, False), (False, True, False)
        found = dict[tuple[bool, bool, bool], str]()
        for shape in (usual, without, (True, False, False), (True, True, False), (False, False, True)):
            self.__dict__["_call_shape"] = shape
            shown = self._attempt([QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}])
            printed = "True" in shown or (shape[1] and "None" in shown)  # Python's form is not JSON
            if MARK in shown and OTHER_MARK in shown and not printed:
                found[shape] = shown
        shapes = list(found) or [usual]
        # Inkling: an empty text is a part of the turn, and none is not
        prefers = usual in found and found.get(without, found[usual]) != found[usual]
        self.__dict__["_call_shape"] = chosen = without if prefers else shapes[0]
        return chosen

    def encode(self, text: str) -> list[int]:
        """Tokenize a piece of a chat; the template has written all special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the exact text of tokens, special ones included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def without_tokens(self, text: str, tokens: Iterable[str] | None = None) -> str:
        """Return a text without special tokens, or without other ones."""
        for token in self.tokenizer.all_special_tokens if tokens is None else tokens:
            if token in text:
                text = text.replace(token, "")
        return text

    # -- features ----------------------------------------------------------------------------------------------

    def shows(self, messages: Sequence[ChatMessage], tools: Any = None) -> bool:
        """True if the template accepts a conversation and its text has the probe's mark."""
        return MARK in self._attempt(messages, tools)

    def _attempt(self, messages: Sequence[ChatMessage], tools: Any = None) -> str:
        try:
            return self.render(messages, tools)
        except ChatTemplateError:
            return ""

    @cached_property
    def variables(self) -> frozenset[str] | None:
        """Names that the template reads and does not set itself before; None if its source cannot be read."""
        own = getattr(self.processor and self.processor.processor, "chat_template", None)
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
        found = set[str]()
        try:
            for tools in (None, [probe_tool()]):
                source = _GENERATION.sub("", own or self.tokenizer.get_chat_template(None, tools))
                found |= jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateSyntaxError, ValueError):  # an extension of a later transformers; no usual template
            return None
        return frozenset(found)

    @cached_property
    def supports_system(self) -> bool:
        """True if it renders a system message."""
        return self.shows([{"role": "system", "content": MARK}, QUESTION])

    @cached_property
    def supports_tools(self) -> bool:
        """True if it renders the tools of a chat."""
        return self.shows([QUESTION], [probe_tool()])

    @cached_property
    def supports_tool_calls(self) -> bool:
        """True if it renders `tool_calls` of a message."""
        return self.shows([QUESTION, call_message([ToolCall(CALL_ID, MARK, {})])])

    @cached_property
    def single_call(self) -> bool:
        """True if it renders one call of a message and refuses, or leaves out, further ones."""
        if not self.supports_tool_calls:
            return False
        calls = [ToolCall(CALL_ID, "first", {}), ToolCall(CALL_ID[::-1], MARK, {})]
        return not self.shows([QUESTION, call_message(calls)])

    @cached_property
    def text_beside_calls(self) -> frozenset[bool]:
        """Kinds of messages that call tools whose content it renders: True for those with reasoning, False for others.

        Mistral's templates leave it out, that of gpt-oss refuses it beside reasoning.
        """
        call = ToolCall(CALL_ID, "tool", {})
        turns = {thinks: call_message([call], MARK, "thought" if thinks else None) for thinks in (False, True)}
        result = tool_result_message(call, "result")
        return frozenset(thinks for thinks, turn in turns.items() if self.shows([QUESTION, turn, result]))

    @cached_property
    def supports_tool_results(self) -> bool:
        """True if it renders messages of the role `tool` after a call."""
        call = ToolCall(CALL_ID, "tool", {})
        turn = call_message([call]) if self.supports_tool_calls else ANSWER
        return self.shows([QUESTION, turn, tool_result_message(call, MARK)])

    @cached_property
    def supports_reasoning(self) -> bool:
        """True if it renders `reasoning_content` of the last message."""
        message = {"role": "assistant", "content": "answer", "reasoning_content": MARK}
        try:
            return MARK in self.render([QUESTION, message], prompt=False)
        except ChatTemplateError:
            return False

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Texts of the tokens that the tokenizer never makes of parts of a word: special ones and added ones."""
        added: dict[str, int] = getattr(self.tokenizer, "get_added_vocab", dict)()
        return frozenset(each for each in {*added, *self.tokenizer.all_special_tokens} if each.strip())

    @cached_property
    def turn_end(self) -> str:
        """Text of the token that ends the policy's turn; empty if the template writes none.

        It is the last special token that a turn has both at the end of a conversation and within one; some templates
        write another one at the end (gpt-oss), and the turns of some end where the next one begins (GLM).
        """
        answer = ANSWER | {"content": MARK}
        last = self.render([QUESTION, answer], prompt=False).rpartition(MARK)[2]
        try:
            followed = self.render([QUESTION, answer, QUESTION], prompt=False).rpartition(MARK)[2]
        except ChatTemplateError:
            return self.last_special(last)
        shared = last[: self.whole_tokens(last, common_prefix(last, followed), followed)]
        return self.last_special(shared) or self.last_special(last) or self.first_special(followed)

    @cached_property
    def call_end(self) -> str:
        """Text of the token that ends a turn with tool calls."""
        call = ToolCall(CALL_ID, OTHER_MARK, {"text": MARK})
        if not self.supports_tool_calls:
            return self.turn_end
        text = self.render([QUESTION, call_message([call])], prompt=False)
        if self.turn_end and self.last_special(text) == self.turn_end:
            return self.turn_end
        if self.last_special(self.render([QUESTION, ANSWER], prompt=False)):
            found = self.last_special(text)
            return found if found and self.turn_end not in text[text.rindex(MARK) :] else self.turn_end
        try:
            followed = self.render([QUESTION, call_message([call]), tool_result_message(call, "result")], prompt=False)
        except ChatTemplateError:
            return self.turn_end
        return (self.first_special(followed[len(text) :]) if followed.startswith(text) else "") or self.turn_end

    def last_special(self, text: str) -> str:
        """The special token that a text ends with, white space aside; empty if there is none."""
        ends = [each for each in self.special_tokens if text.rstrip().endswith(each)]
        return max(ends, key=len, default="")

    def first_special(self, text: str) -> str:
        """The special token that a text begins with, white space aside; empty if there is none."""
        return max((each for each in self.special_tokens if text.lstrip().startswith(each)), key=len, default="")

    def whole_tokens(self, text: str, length: int, *others: str) -> int:
        """Shorten the length of a text's beginning if it would end within a special token of this or another text."""
        for token in (*self.special_tokens, REASONING_START, REASONING_END):
            for each in (text, *others):
                start = each.rfind(token[0], max(0, length - len(token) + 1), length)
                while start >= 0:
                    if each.startswith(token, start) and start + len(token) > length:
                        length = start
                    start = each.rfind(token[0], max(0, length - len(token) + 1), min(start, length))
        return length

    @cached_property
    def reasoning_tags(self) -> tuple[str, str]:
        """Texts that begin and end the reasoning of the last turn, with white space: `<think>\\n`, `\\n</think>\\n\\n`.

        The usual ones for a template that renders no reasoning.
        """
        usual = f"{REASONING_START}\n", f"\n{REASONING_END}\n\n"
        if not self.supports_reasoning:
            return usual
        message = {"role": "assistant", "content": OTHER_MARK, "reasoning_content": MARK}
        text = self.render([QUESTION, message], prompt=False)
        bare = self.render([QUESTION], prompt=False)
        turn = text[common_prefix(text, bare) :] if OTHER_MARK in text else ""
        before, _, behind = turn.partition(MARK)
        close = behind.partition(OTHER_MARK)[0]
        with suppress(ChatTemplateError):  # marks of an answer are no part of the end of reasoning
            calls = call_message([ToolCall(CALL_ID, "tool", {})], reasoning=MARK)
            other = self.render([QUESTION, calls], prompt=False).partition(MARK)[2] if self.supports_tool_calls else ""
            shared = close[: self.whole_tokens(close, common_prefix(close, other), other)]
            close = shared if shared.strip() else close
        starts = [each for each in (*self.special_tokens, REASONING_START) if each in before]
        start = max(starts, key=lambda each: (before.rindex(each), len(each)), default="")
        if not start or not close.strip():
            return usual
        return before[before.rindex(start) :], close

    def check_shown(self, messages: Sequence[ChatMessage], tools: Any, text: str) -> None:
        """Raise ChatTemplateError if a message, or a tool, is not in the rendered text."""
        names = [tool.get("function", tool)["name"] for tool in tools or ()]
        if missing := names if names and not self.supports_tools else [each for each in names if each not in text]:
            raise ChatTemplateError(
                f"the tokenizer's chat template does not show the tool `{missing[0]}`; use a checkpoint whose template "
                'knows tools, or leave them out by taskset.fields.tools: ""'
            )
        for number, message in enumerate(messages):
            called = [each.get("function", each)["name"] for each in message.get("tool_calls") or ()]
            if not all(name in text for name in called) or (called and not self.supports_tool_calls):
                raise ChatTemplateError(
                    f"the tokenizer's chat template does not show the tool calls of message {number + 1}; use a "
                    "checkpoint whose template knows tool calls"
                )
            if len(called) > 1 and self.single_call:
                raise ChatTemplateError(
                    f"message {number + 1} has {len(called)} tool calls, and the tokenizer's chat template shows one a "
                    "turn; split the message"
                )
            content = message.get("content")
            if not isinstance(content, str) or not content.strip():
                continue
            if len(content) >= _LONG and content.strip() in text:
                continue
            if message["role"] == "assistant" and REASONING_END in content:
                continue  # its reasoning may be dropped, as earlier reasoning is
            roles = [each["role"] for each in messages]
            key = roles[number], roles[number - 1] if number else "", number == len(roles) - 1, bool(tools)
            if key not in self._shown:
                marked = [*messages[:number], {**message, "content": MARK}, *messages[number + 1 :]]
                self._shown[key] = self.shows(marked, tools)
            if not self._shown[key]:
                raise ChatTemplateError(
                    f"the tokenizer's chat template does not show message {number + 1}, of the role "
                    f"`{message['role']}`; give it another role (a developer's message is often called system), or "
                    "leave it out"
                )


def content_parts(content: Any) -> Any:
    """Turn a text with references to pictures into content parts; other contents stay as they are."""
    if not isinstance(content, str):
        return content or [{"type": "text", "text": ""}]
    found = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
        for each in split_references(content)
    ]
    return found or [{"type": "text", "text": ""}]


def common_prefix(a: Iterable[Any], b: Iterable[Any]) -> int:
    """Length of the part that two sequences begin with."""
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return length
