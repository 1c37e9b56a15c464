"""Renders chats for rollouts: prompts that continue the policy's own tokens, and its turns as messages.

A conversation continues from the tokens that the policy has produced: the text that the template puts after its turn is
appended. If a template rewrites the history (it drops earlier reasoning, or formats past turns differently), the
history is rendered again: the sample forks there.

For a vision-language model, a picture in a message is a reference in its text (`rollmill.data.picture_turns`), and a
piece of a conversation with pictures is encoded by the model's processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollmill.data.images import ImageRef, PictureFolder
from rollmill.data.picture_turns import PictureTurn, encode_turn, join_turns, referred_pictures
from rollmill.data.renderer import ChatMessage, Renderer, Switches, renderer_of
from rollmill.data.renderer.call_formats import ToolFormat
from rollmill.errors import ChatTemplateError, EngineError, TasksetError
from rollmill.types import Completion, ParsedReply

if TYPE_CHECKING:
    from rollmill.data.picture_prompts import PictureProcessor, PicturePrompt


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A turn of the policy and everything before it."""

    messages: tuple[ChatMessage, ...]  #: the conversation as the caller sees it, this turn included
    raw: tuple[ChatMessage, ...]  #: the same, with the policy's turns as the template shows them, with reasoning
    tools: Any  #: the tools offered in the prompt
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  #: of the turn
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
        if not getattr(tokenizer, "stop_ids", None):
            tokenizer.stop_ids = eos_ids  # for `renderer_of`
        self._processor = _processor(tokenizer)
        self.sees = self._processor is not None
        self.single_prompt = self._processor is not None and self._processor.single_prompt
        self.picture_token = None if self._processor is None else self._processor.image_token_id
        self.folder = PictureFolder()
        if self._processor is not None:
            self.folder = PictureFolder(self._processor.folder, self._processor.folder_bytes)

    def renderer(self, name: str = "a chat", switches: Switches | None = None) -> Renderer:
        """The model's renderer. Raises EngineError if the tokenizer has no usable chat template."""
        try:
            return renderer_of(self.tokenizer).bound(switches)
        except ChatTemplateError as error:
            raise EngineError(f"{name}: {error}, or `policy.complete`") from error

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        replies: Sequence[RecordedReply] = (),
        tools: Any = None,
        *,
        format: ToolFormat = "auto",
        switches: Switches | None = None,
        name: str = "a chat",
        check: Callable[[str], None] | None = None,
    ) -> ChatPrompt:
        """Tokenize a conversation, continuing from the longest recorded reply in `replies` that it begins with.

        Tools, calls and results that the template does not render become text, calls in `format`.

        Raises EngineError if the tokenizer has no chat template, the template refuses or does not show the messages, or
        a picture cannot be prepared, and what `check` raises for the rendered text, before it is tokenized.
        """
        earlier = (
            () if self.single_prompt else replies
        )  # a later turn changes what the tokens of earlier ones attend to
        known = [each for each in earlier if each.tools == tools and _begins(messages, each.messages)]
        known.sort(key=lambda each: (len(each.messages), _same_reasoning(messages, each.messages)), reverse=True)
        raw = (*known[0].raw, *messages[len(known[0].messages) :]) if known else tuple(messages)
        renderer = self.renderer(name, switches)
        try:
            fitted, shown = renderer.fitted(raw, tools, format)
            text = renderer.text(fitted, shown)
            if check is not None:
                check(text)
            for each in known:
                turn = _nth_assistant(fitted, sum(one["role"] == "assistant" for one in each.raw))
                behind = renderer.text_behind(each.prompt_ids, each.token_ids, fitted, shown, turn=turn)
                if behind is not None:
                    images = _pictures(messages[len(each.messages) :])
                    ids = [*each.prompt_ids, *each.token_ids]
                    return self._encoded(behind, images, ChatPrompt(ids, text, raw, each, each.turns), name)
            images = _pictures(raw)
            if self._processor is not None and text.count(self._processor.image_token) != len(images):
                raw = tuple(self._without_places(each) for each in raw)  # the policy may have written the picture token
                text = renderer.text(*renderer.fitted(raw, tools, format))
        except ChatTemplateError as error:
            raise EngineError(f"{name}: {error}") from error
        return self._encoded(text, images, ChatPrompt([], text, raw, None), name)

    def parse(
        self,
        prompt: ChatPrompt,
        completion: Completion,
        tools: Any = None,
        *,
        format: ToolFormat | None = None,
        switches: Switches | None = None,
        salt: str = "",
        name: str = "a chat",
    ) -> ParsedReply:
        """Take a turn of the policy apart; its calls are read if there are tools, or a format is given."""
        return self.renderer(name, switches).parse(
            completion.token_ids.tolist(),
            prompt.token_ids,
            tools,
            calls=bool(tools) or format is not None,
            format=format or "auto",
            text=completion.text,
            salt=salt,
        )

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
        self,
        messages: Sequence[ChatMessage],
        prompt: ChatPrompt,
        tools: Any,
        completion: Completion,
        reply: ParsedReply,
    ) -> RecordedReply:
        """Record the policy's turn.

        Args:
            messages: the conversation as the caller sees it, the turn included.
            reply: the turn, taken apart.
        """
        message: ChatMessage = reply.message
        if reply.reasoning is not None and not self.renderer().template.supports_reasoning:
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
            if not reply.tool_calls:  # the tags are part of the text
                message = {**message, "content": completion.text}
        ids = completion.token_ids.tolist()
        return RecordedReply(
            tuple(messages), (*prompt.raw, message), tools, tuple(prompt.token_ids), tuple(ids), prompt.turns
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of a chat; the template has added all special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of tokens, special ones included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


def _begins(messages: Sequence[ChatMessage], with_: Sequence[ChatMessage]) -> bool:
    """True if a conversation continues another one. Its reasoning may be missing, as clients may leave it out."""
    pairs = zip(messages, with_, strict=False)
    return len(with_) < len(messages) and all(_without_reasoning(a) == _without_reasoning(b) for a, b in pairs)


def _same_reasoning(messages: Sequence[ChatMessage], with_: Sequence[ChatMessage]) -> bool:
    return all(a == b for a, b in zip(messages, with_, strict=False))


def _without_reasoning(message: ChatMessage) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _processor(tokenizer: Any) -> PictureProcessor | None:
    found: PictureProcessor | None = getattr(tokenizer, "picture_processor", None)
    return found


def _nth_assistant(messages: Sequence[ChatMessage], number: int) -> int:
    """Index of the assistant's n-th message, counted from 1."""
    return [i for i, each in enumerate(messages) if each["role"] == "assistant"][number - 1]


def _pictures(messages: Sequence[ChatMessage]) -> list[ImageRef]:
    return referred_pictures([each.get("content") for each in messages])
