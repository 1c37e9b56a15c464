"""Text that can be shown while a completion is sampled: what no later token can change.

What is shown is always a prefix of the whole, of the reasoning and of the content. Where the end may still change what
was said before, such as at the marks of a tool call, nothing more is shown until the whole turn has been taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

from rollmill.data.renderer import ChatMessage, Renderer
from rollmill.data.renderer.call_formats import TOOL_CALL_START
from rollmill.data.renderer.families import FamilyRenderer
from rollmill.data.renderer.template import ANSWER, CALL_ID, MARK, QUESTION, call_message, probe_tool
from rollmill.errors import ChatTemplateError
from rollmill.types import ParsedReply, ToolCall

_TEXT_MARKS = (TOOL_CALL_START, "```")
"""Possible beginnings of a call in the formats for any model."""
_THINK = re.compile(r"<\W?[\w:]*think[\w:]*>")
_TAIL = 16  # tokens of a prompt that are looked at for a tag that opens the reasoning


class TextDelta(NamedTuple):
    """New text of a turn."""

    content: str = ""
    reasoning: str = ""


class Detokenizer:
    """Decodes tokens as they come, without half characters."""

    def __init__(self, tokenizer: Any, *, special: bool) -> None:
        self._tokenizer, self._skips = tokenizer, not special
        self._tokens = list[int]()
        self._from, self._read = 0, 0  # tokens before `_read` are in the text; decoding begins at `_from`

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete now."""
        self._tokens.append(token)
        before = self._decode(self._from, self._read)
        now = self._decode(self._from, len(self._tokens))
        if now.endswith("\ufffd"):
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=self._skips)
        return text


class TextStream:
    """Streams a text up to a stop string.

    Attributes:
        shown: the text so far.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.shown = ""
        self._decoder, self._stops, self._text = Detokenizer(tokenizer, special=False), tuple(stops), ""

    def push(self, token: int) -> TextDelta:
        """Add a token; return the text that can be shown now."""
        self._text += self._decoder.push(token)
        new = self._text[len(self.shown) : _safe(self._text, self._stops, len(self.shown))[0]]
        self.shown += new
        return TextDelta(new)

    def finish(self, text: str) -> TextDelta:
        """Return the rest of the whole text. Text shown already stays, even if it differs (bytes that are no
        character)."""
        rest = text[len(self.shown) :]
        self.shown += rest
        return TextDelta(rest)


@dataclass(frozen=True, slots=True)
class ReplyMarks:
    """Texts at which the turn of a model may become something else: reasoning, an answer or a call.

    Attributes:
        texts: from one of these on, nothing is shown until the end.
        tags: texts that begin and end the reasoning; None: it is shown at the end.
        tag_ids: the tokens that they have to be, if the model's family reads tokens.
        plain: a turn without tags is an answer; else it may be anything until the end.
        trimmed: whether white space before the content is left out in any case.
    """

    texts: tuple[str, ...]
    tags: tuple[str, str] | None
    tag_ids: tuple[int, int] | None
    plain: bool
    trimmed: bool


@lru_cache(maxsize=64)
def reply_marks(renderer: Renderer, tools: bool) -> ReplyMarks:
    """Find the marks of a model's turns, which may call tools."""
    template, family = renderer.template, renderer.replies.family
    start, end = (each.strip() for each in template.reasoning_tags)
    texts = set(_control_texts(renderer))
    if tools:
        format = renderer.replies.call_format if renderer.replies.native_calls else None
        native = family is not None or format is not None
        texts |= set() if native else set(_TEXT_MARKS)
        if family is None and format is not None:
            texts |= {format.section.strip(), format.start.strip()}
    ids = _token_id(renderer, start), _token_id(renderer, end)
    tag_ids: tuple[int, int] | None = None
    if family is not None and ids[0] is not None and ids[1] is not None:
        tag_ids = ids[0], ids[1]
    known = tag_ids is not None or renderer.replies.text_tags
    by_tags = family is None or (known and bool(_THINK.fullmatch(start) and _THINK.fullmatch(end)))
    texts = texts - {start, end, ""} if by_tags else texts - {""}
    trimmed = tools or family is not None or template.supports_reasoning
    plain = _writes_plain(renderer) if family is None else _reads_plain(renderer, family)
    return ReplyMarks(tuple(sorted(texts)), (start, end) if by_tags else None, tag_ids, plain, trimmed)


def _writes_plain(renderer: Renderer) -> bool:
    """False if the template writes something before each answer, which is no part of it."""
    try:
        ids, mask = renderer.demonstration([QUESTION, ANSWER | {"content": MARK}], 1)
    except ChatTemplateError:
        return False
    turn = renderer.decode([token for token, learned in zip(ids, mask, strict=True) if learned])
    before, (start, end) = turn.partition(MARK)[0], renderer.template.reasoning_tags
    return not (before.rpartition(end.strip())[2] if start.strip() in before else before).strip()


def _reads_plain(renderer: Renderer, family: FamilyRenderer) -> bool:
    """True if a family takes a turn without marks for an answer."""
    prompt_ids = renderer.encode(renderer.template.render([QUESTION]))
    reply = family.parse(renderer.encode(MARK), prompt_ids)
    return opens_reasoning(renderer, prompt_ids) or (reply.content == MARK and reply.reasoning is None)


def _control_texts(renderer: Renderer) -> frozenset[str]:
    """Texts of tokens that are no plain text: special ones, and those that the template writes."""
    turn = call_message([ToolCall(CALL_ID, MARK, {"text": MARK})], reasoning=MARK)
    chats: tuple[list[ChatMessage], ...] = [QUESTION], [QUESTION, turn]
    written = "".join(_rendered(renderer, each) for each in chats)
    written += str(renderer.tokenizer.chat_template)
    special = set(renderer.tokenizer.all_special_tokens)
    return frozenset(each for each in renderer.template.special_tokens if each in special or each in written)


def _rendered(renderer: Renderer, messages: list[ChatMessage]) -> str:
    try:
        return renderer.template.render(messages, [probe_tool()], prompt=len(messages) == 1)
    except ChatTemplateError:
        return ""


def _token_id(renderer: Renderer, text: str) -> int | None:
    """The id of a tag that is a token; None if it is several."""
    return renderer.tokenizer.convert_tokens_to_ids(text) if text in renderer.template.special_tokens else None


def opens_reasoning(renderer: Renderer, prompt_ids: Sequence[int]) -> bool:
    """True if a prompt ends within the reasoning of the policy's turn."""
    start = renderer.template.reasoning_tags[0].strip()
    return renderer.decode(prompt_ids[-_TAIL:]).rstrip().endswith(start)


class _Part(Enum):
    BEGINNING = auto()
    REASONING = auto()
    CONTENT = auto()
    HELD = auto()


class ReplyStream:
    """Streams a turn of a chat: its reasoning, then its content.

    Args:
        opened: the prompt has opened the reasoning.

    Attributes:
        reasoning, content: what was shown so far.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], marks: ReplyMarks, *, opened: bool = False, tools: bool = False
    ) -> None:
        self.reasoning, self.content = "", ""
        self._decoder, self._marks, self._tools = Detokenizer(tokenizer, special=True), marks, tools
        self._stops = (*stops, *marks.texts)
        self._part = _Part.REASONING if opened else _Part.BEGINNING
        if marks.tags is None and (opened or not marks.plain):
            self._part = _Part.HELD
        self._pending, self._trims = "", marks.trimmed  # text of the part that is not shown

    def push(self, token: int) -> TextDelta:
        """Add a token; return the text that can be shown now."""
        if self._part is _Part.HELD:
            return TextDelta()
        self._pending += self._decoder.push(token)
        reasoning = ""
        if self._part is _Part.BEGINNING:
            self._begin(token)
        if self._part is _Part.REASONING:
            reasoning = self._reason(token)
        content = self._answer() if self._part is _Part.CONTENT else ""
        self.reasoning += reasoning
        self.content += content
        return TextDelta(content, reasoning)

    def finish(self, reply: ParsedReply) -> TextDelta:
        """Return the rest of the whole turn. Text shown already stays, even if it differs (bytes that are no
        character)."""
        trims = self._marks.trimmed or reply.reasoning is not None
        content = reply.content.lstrip() if trims else reply.content
        reasoning = (reply.reasoning or "").strip()
        delta = TextDelta(content[len(self.content) :], reasoning[len(self.reasoning) :])
        self.content += delta.content
        self.reasoning += delta.reasoning
        return delta

    def _begin(self, token: int) -> None:
        start, end = self._marks.tags or ("", "")
        text = self._pending.lstrip()
        if start and text.startswith(start):
            self._part = self._after_tag(token, 0, _Part.REASONING)
            self._pending, self._trims = text[len(start) :], True
        elif not (start and (start.startswith(text) or end.startswith(text))):
            closes = bool(end) and text.startswith(end)  # of a reasoning that was not opened
            self._part = _Part.CONTENT if self._marks.plain and not closes else _Part.HELD

    def _reason(self, token: int) -> str:
        assert self._marks.tags is not None
        start, end = self._marks.tags
        others, found = (*self._stops, start), self._pending.find(end)
        if found < 0:
            return self._shown_of((*others, end), self.reasoning)
        if _safe(self._pending[: found + len(end)], others)[0] < found:
            self._part = _Part.HELD
            return ""
        part = self._after_tag(token, 1, _Part.CONTENT)
        shown = "" if part is _Part.HELD else self._shown_of((end,), self.reasoning)
        self._pending, self._part, self._trims = self._pending.lstrip()[len(end) :], part, True
        return shown

    def _after_tag(self, token: int, number: int, part: _Part) -> _Part:
        """The part behind a tag, which may have to be one token: a family takes the same text for plain text."""
        ids = self._marks.tag_ids
        return part if ids is None or ids[number] == token else _Part.HELD

    def _answer(self) -> str:
        if self._tools and not self.content and self._pending.lstrip()[:1] in ("", "{", "["):
            return ""  # it may be a call as a whole
        return self._shown_of(self._stops, self.content, self._trims)

    def _shown_of(self, marks: Sequence[str], shown: str, trims: bool = True) -> str:
        """Take the pending text before the first mark. White space at the beginning and the end of a part is left out,
        except for a plain answer's."""
        safe, found = _safe(self._pending, marks)
        if found:
            self._part = _Part.HELD
        text = self._pending[:safe]
        if trims:
            kept = len(text.rstrip())
            text = text[:kept] if shown else text[:kept].lstrip()
            safe = kept
        self._pending = self._pending[safe:]
        return text


def _safe(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, bool]:
    """Length of the text before the first mark, or what may become one at its end; and whether there is a whole one.

    Args:
        start: text before this has none.
    """
    safe, whole = len(text), False
    for mark in marks:
        found = text.find(mark, start)
        if found < 0:
            most = min(len(mark) - 1, len(text) - start)
            found = len(text) - next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
        else:
            whole = True
        safe = min(safe, found)
    return safe, whole
