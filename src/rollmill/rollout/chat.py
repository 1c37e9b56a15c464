"""Renders chat messages as tokens, without ever turning the policy's own tokens into text and back.

A conversation continues from the tokens that the policy has produced: the text that the template puts after its turn is
appended. If a template rewrites the history (it drops earlier reasoning, or formats past turns differently), the
history is rendered again: the sample forks there.

For a model that sees, a picture in a message is a reference in its text (`rollmill.data.picture_turns`), and a piece of
a conversation with pictures is encoded by the model's processor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollmill.data.images import ImageRef, PictureFolder
from rollmill.data.picture_turns import PictureTurn, encode_turn, join_turns, referred_pictures, split_references
from rollmill.errors import EngineError, TasksetError
from rollmill.rollout.tools.formats import ToolFormat, describe_tools, render_tool_calls, wrap_tool_response
from rollmill.types import Completion, ToolCall

if TYPE_CHECKING:
    from rollmill.models.picture_prompts import PictureProcessor, PicturePrompt

ChatMessage = Mapping[str, Any]
"""One chat message in OpenAI's format: `role`, `content`, perhaps `tool_calls` and others."""

_MARK = "rollmillprobe"
_QUESTION = {"role": "user", "content": "question"}
_ANSWER = {"role": "assistant", "content": "answer"}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _MARK, "description": "a tool", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """A tokenizer's chat template, and messages fitted to the features it lacks.

    Templates are programs, so each feature is detected by rendering a small conversation.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def apply(self, messages: Sequence[ChatMessage], tools: Any = None) -> str:
        """Render messages as text, ready for the policy's turn. Raises whatever the template raises."""
        processor = _processor(self._tokenizer)
        if processor is not None:
            parts = [{**each, "content": _parts(each.get("content"))} for each in messages]
            return processor.apply_template(parts, self._tokenizer, tools)
        text: str = self._tokenizer.apply_chat_template(
            [dict(each) for each in messages], tools=tools, add_generation_prompt=True, tokenize=False
        )
        return text

    @cached_property
    def supports_system(self) -> bool:
        """True if it renders a system message."""
        return self._shows([{"role": "system", "content": _MARK}, _QUESTION])

    @cached_property
    def supports_tools(self) -> bool:
        """True if it renders the tools of a chat."""
        return self._shows([_QUESTION], [_PROBE_TOOL])

    @cached_property
    def supports_tool_results(self) -> bool:
        """True if it renders messages of the role `tool` after a call that is part of a turn's text."""
        result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "tool", "content": _MARK}
        return self._shows([_QUESTION, _ANSWER, result, _ANSWER, _QUESTION])

    @cached_property
    def supports_tool_calls(self) -> bool:
        """True if it renders `tool_calls` of a message."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": _MARK, "arguments": {}}}
        return self._shows([_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}])

    def fitted(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, format: ToolFormat
    ) -> tuple[list[ChatMessage], Any]:
        """Fit messages and tools to the template: parts that it would not render become text.

        Earlier messages become the same text whatever follows, so that a conversation can continue.
        """
        found: list[ChatMessage] = []
        for message in messages:
            if message["role"] == "tool" and not self.supports_tool_results:
                _add_to_user(found, wrap_tool_response(_text(message)))
            elif message["role"] == "user" and found and found[-1].get("of_tool") and _plain(message):
                _add_to_user(found, _text(message))
            elif message.get("tool_calls"):
                found.append(self._with_calls(message, format))
            else:
                found.append(message)
        fitting = [{key: value for key, value in each.items() if key != "of_tool"} for each in found]
        if not tools or self.supports_tools:
            return list(fitting), tools
        return self._with_system_text(fitting, describe_tools(tools, format)), None

    def _with_calls(self, message: ChatMessage, format: ToolFormat) -> ChatMessage:
        """Render a turn that is not the policy's own, with its calls. Templates take arguments as objects."""
        calls = [_call(each) for each in message["tool_calls"]]
        if not self.supports_tool_calls:
            text = "\n".join(each for each in (_text(message), render_tool_calls(calls, format)) if each)
            return {"role": message["role"], "content": text}
        given = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
        return {**message, "content": _text(message), "tool_calls": given}

    def _with_system_text(self, messages: list[dict[str, Any]], text: str) -> list[ChatMessage]:
        """Add a text to the system message, or before the first message if the template supports none."""
        first = messages[0] if messages else {}
        if first.get("role") == "system" or (messages and not self.supports_system):
            before = [text, _text(first)] if first["role"] != "system" else [_text(first), text]
            return [{**first, "content": "\n\n".join(before)}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def _shows(self, messages: list[dict[str, Any]], tools: Any = None) -> bool:
        try:
            return _MARK in self.apply(messages, tools)
        except Exception:  # templates raise Jinja's errors and Python's: not supported
            return False


def _call(entry: Mapping[str, Any]) -> ToolCall:
    """Parse an entry of `tool_calls`, whose arguments are text in OpenAI's format."""
    function = entry["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError):  # as a policy may have written it
            arguments = json.loads(arguments or "{}")
    return ToolCall(entry.get("id", ""), function["name"], arguments)


def _plain(message: ChatMessage) -> bool:
    return isinstance(message["content"], str)


def _text(message: ChatMessage) -> str:
    return message.get("content") or ""


def _add_to_user(found: list[ChatMessage], text: str) -> None:
    """Join consecutive results, and a user's text after them, into one turn, as some templates require."""
    if found and found[-1].get("of_tool"):
        found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{text}"}
    else:
        found.append({"role": "user", "content": text, "of_tool": True})


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A turn of the policy and everything before it."""

    messages: tuple[ChatMessage, ...]  #: the conversation as the caller sees it, this turn included
    raw: tuple[ChatMessage, ...]  #: the same, with the policy's turns as it wrote them
    tools: Any  #: the tools offered in the prompt
    prompt: str  #: the prompt as text
    text: str  #: the turn as text, without its end token
    token_ids: tuple[int, ...]  #: prompt and turn
    end: str | None  #: its end token; None if it was truncated, or ended by a stop string
    turns: tuple[PictureTurn, ...] = ()  #: pieces with pictures before it


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt for the policy: `token_ids` encode `text`, or continue tokens that it has produced."""

    token_ids: list[int]
    text: str
    raw: tuple[ChatMessage, ...]
    continues: RecordedReply | None
    turns: tuple[PictureTurn, ...] = ()  #: its pieces with pictures
    pictures: PicturePrompt | None = None  #: the prompt up to its last picture


class ChatRenderer:
    """Renders chats as text and tokens by a tokenizer's chat template.

    Args:
        eos_ids: the ids that end a turn of the policy.

    Attributes:
        sees: whether the model is a vision-language model.
        single_prompt: whether it takes one prompt with pictures and nothing else: see `PictureProcessor`.
        picture_token: id of its token for a part of a picture.
        folder: keeps pictures that are no files.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self._template = ChatTemplate(tokenizer)
        self._processor = _processor(tokenizer)
        self.sees = self._processor is not None
        self.single_prompt = self._processor is not None and self._processor.single_prompt
        self.picture_token = None if self._processor is None else self._processor.image_token_id
        self.folder = PictureFolder()
        if self._processor is not None:
            self.folder = PictureFolder(self._processor.folder, self._processor.folder_bytes)

    def render(
        self, messages: Sequence[ChatMessage], tools: Any = None, *, format: ToolFormat = "auto", name: str = "a chat"
    ) -> str:
        """Render messages as text, ready for the policy's turn.

        Tools, calls and results that the template does not render become text, calls in `format`.

        Raises:
            EngineError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise EngineError(
                f"{name}: the model's tokenizer has no chat template; use a checkpoint with one, or `policy.complete`"
            )
        try:
            return self._template.apply(*self._template.fitted(messages, tools, format))
        except Exception as error:  # templates are programs: they raise Jinja's errors and Python's
            raise EngineError(f"{name}: the tokenizer's chat template refuses the messages: {error}") from error

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        replies: Sequence[RecordedReply] = (),
        tools: Any = None,
        *,
        format: ToolFormat = "auto",
        name: str = "a chat",
        check: Callable[[str], None] | None = None,
    ) -> ChatPrompt:
        """Tokenize a conversation, continuing from the longest recorded reply in `replies` that it begins with.

        Raises EngineError like `render` or if a picture cannot be prepared, and what `check` raises for the rendered
        text, before it is tokenized.
        """
        earlier = (
            () if self.single_prompt else replies
        )  # a later turn changes what the tokens of earlier ones attend to
        known = [each for each in earlier if each.tools == tools and _begins(messages, each.messages)]
        known.sort(key=lambda each: len(each.messages), reverse=True)
        raw = (*known[0].raw, *messages[len(known[0].messages) :]) if known else tuple(messages)
        text = self.render(raw, tools, format=format, name=name)
        if check is not None:
            check(text)
        for each in known:
            behind = self._behind(each, text)
            if behind is not None:
                images = _pictures(messages[len(each.messages) :])
                return self._encoded(behind, images, ChatPrompt([*each.token_ids], text, raw, each, each.turns), name)
        images = _pictures(raw)
        if self._processor is not None and text.count(self._processor.image_token) != len(images):
            raw = tuple(self._without_places(each) for each in raw)  # the policy may have written the picture token
            text = self.render(raw, tools, format=format, name=name)
        return self._encoded(text, images, ChatPrompt([], text, raw, None), name)

    def _encoded(self, text: str, images: Sequence[ImageRef], before: ChatPrompt, name: str) -> ChatPrompt:
        """Append a piece of text, which shows these pictures, to the tokens of a prompt."""
        turns = before.turns
        if images:
            turn = PictureTurn(len(before.token_ids), text, tuple(images))
            turns, added = (*turns, turn), self._seen(turn, name).token_ids
        else:
            added = self.encode(text)
        ids = [*before.token_ids, *added]
        return replace(before, token_ids=ids, turns=turns, pictures=self.pictures(ids, turns, name))

    def pictures(self, token_ids: Sequence[int], turns: Sequence[PictureTurn], name: str) -> PicturePrompt | None:
        """The tokens up to the last picture; None without pictures.

        Raises EngineError if a picture is gone, or the model takes one prompt with pictures only and these are not one.
        """
        if self._processor is None:
            return None
        try:
            found = join_turns(self._processor, token_ids, turns, name)
        except TasksetError as error:
            raise EngineError(str(error)) from error
        if self.single_prompt and (found is None or len(turns) > 1 or found.token_ids != list(token_ids)):
            raise EngineError(
                f"{name}: the model attends in both directions within its whole prompt, which has pictures; give it "
                "neither a text without pictures nor tokens that continue its answer, or use another model"
            )
        return found

    def _seen(self, turn: PictureTurn, name: str) -> PicturePrompt:
        if self._processor is None:
            raise EngineError(
                f"{name}: a message has a picture, and the model reads text only; use a vision-language model"
            )
        try:
            return encode_turn(self._processor, turn, name)
        except TasksetError as error:
            raise EngineError(str(error)) from error

    def _without_places(self, message: ChatMessage) -> ChatMessage:
        """A message without picture tokens, if it is a turn of the policy."""
        assert self._processor is not None
        if message["role"] != "assistant" or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": message["content"].replace(self._processor.image_token, "")}

    def record_reply(
        self, messages: Sequence[ChatMessage], prompt: ChatPrompt, tools: Any, completion: Completion
    ) -> RecordedReply:
        """Record the policy's turn.

        Args:
            messages: the conversation as the caller sees it, the turn included.
        """
        ids = completion.token_ids.tolist()
        ended = bool(ids) and ids[-1] in self.eos_ids
        text = self.decode(ids[:-1] if ended else ids)
        raw = (*prompt.raw, {"role": "assistant", "content": text})
        end = self.decode(ids[-1:]) if ended else None
        tokens = (*prompt.token_ids, *ids)
        return RecordedReply(tuple(messages), raw, tools, prompt.text, text, tokens, end, prompt.turns)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of a chat; the template has added all special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of tokens, special ones included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _behind(self, reply: RecordedReply, text: str) -> str | None:
        """Text after the turn in a rendered conversation; None if the template has changed the turn.

        White space around the turn may differ: templates strip or add some, and the tokens stay as they are.
        """
        if not text.startswith(reply.prompt):
            return None
        rest = text[len(reply.prompt) :]
        stripped = reply.text.strip()
        for shown, written in ((rest, reply.text), (rest, stripped), (rest.lstrip(), stripped)):
            behind = shown.removeprefix(written)
            if shown.startswith(written) and behind.startswith(reply.end or ""):
                return behind.removeprefix(reply.end or "")
        return None


def _begins(messages: Sequence[ChatMessage], with_: Sequence[ChatMessage]) -> bool:
    return len(with_) < len(messages) and all(a == b for a, b in zip(messages, with_, strict=False))


def _processor(tokenizer: Any) -> PictureProcessor | None:
    found: PictureProcessor | None = getattr(tokenizer, "picture_processor", None)
    return found


def _parts(content: Any) -> Any:
    """A text with references as content parts; other contents as they are."""
    if not isinstance(content, str):
        return content
    found = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
        for each in split_references(content)
    ]
    return found or [{"type": "text", "text": ""}]


def _pictures(messages: Sequence[ChatMessage]) -> list[ImageRef]:
    return referred_pictures([each.get("content") for each in messages])
