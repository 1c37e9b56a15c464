"""Independent answers: what transformers' `apply_chat_template` shows, where turns end, and what TRL trains on.

A history can be put to a template in several forms (arguments as an object or as JSON, content as text or as a list of
parts, reasoning under several keys). A form counts if the text shows all of the history; the first that does is that
of the template. Every text of such a form is an acceptable answer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bench.chat_templates.corpus import ChatTemplate
from bench.chat_templates.tokenizers import stand_in

Messages = Sequence[Mapping[str, Any]]
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Tags that open reasoning in a prompt, and those that close it.
REASONING_TAGS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<think:opensource>": "</think:opensource>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "[THINK]": "[/THINK]",
    "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",
}
PROBE = "qqq"  #: end of a function's name by which a text is seen to show calls, and not only the tools
QUESTION, ANSWER, NEXT = "How much is 2 + 3?", "It is 5.", "And one more?"


@dataclass(frozen=True)
class Sample:
    """A turn as the model would sample it: the prompt, and the turn with its end."""

    prompt: str
    turn: str
    shown: str  #: the part of the turn that the template shows
    reasoning: str | None = None  #: put before that part, since the prompt has opened the reasoning


class Oracle:
    """Answers for one template, with its stand-in tokenizer."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.tokenizer, self.end_ids = stand_in(template)
        self.ends = tuple(self.tokenizer.convert_ids_to_tokens(sorted(self.end_ids)))
        self._texts: dict[str, list[str]] = {}
        self._trained = None if template.training is None else stand_in(replace(template, text=template.training))[0]

    def ids(self, text: str) -> list[int]:
        """Tokens of a rendered text."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, control tokens included."""
        found: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return found

    def texts(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        switches: Mapping[str, Any] | None = None,
        *,
        generation: bool = False,
        as_system: bool = True,
    ) -> list[str]:
        """Acceptable texts of a history, the preferred first; none if the template cannot show it.

        Args:
            as_system: a developer's message may be shown as a system message.
        """
        key = json.dumps([list(messages), tools, switches, generation, as_system])
        if key not in self._texts:
            self._texts[key] = self._all_texts(messages, tools, switches, generation, as_system)
        return self._texts[key]

    def _all_texts(self, messages: Messages, tools: Any, switches: Any, generation: bool, as_system: bool) -> list[str]:
        for forms in _forms(messages, as_system):
            found: list[str] = []
            for form in forms:
                text = self._render(form, tools, switches, generation)
                if text is not None and text not in found and _shows(text, messages, form):
                    probed = self._render(_probe(form), tools, switches, generation)
                    calls = sum(len(message.get("tool_calls", ())) for message in form)
                    if probed is None or probed.count(PROBE) >= calls:
                        found.append(text)
            if found:
                return found
        return []

    def shows_tools(self, messages: Messages, tools: Sequence[Any]) -> bool:
        """Whether the prompt names the tools with their descriptions and parameters."""
        wanted = [tool["function"]["name"] for tool in tools]
        wanted += [tool["function"]["description"].rstrip(".") for tool in tools]
        wanted += [name for tool in tools for name in tool["function"]["parameters"]["properties"]]
        return any(all(word in text for word in wanted) for text in self.texts(messages, tools, generation=True))

    def end_after(self, text: str, position: int) -> int | None:
        """Position after the first token that ends a turn, from `position` on; None if there is none."""
        found = [text.find(end, position) + len(end) for end in self.ends if text.find(end, position) >= 0]
        return min(found, default=None)

    def header(self) -> str:
        """End of a prompt, after the question."""
        texts = self.texts([{"role": "user", "content": QUESTION}], generation=True)
        return texts[0].rpartition(QUESTION)[2] if texts else ""

    def without_tokens(self, text: str) -> str:
        """The text without added tokens."""
        for token in self.tokenizer.get_added_vocab():
            text = text.replace(token, "")
        return text

    def end(self, messages: Messages = ()) -> str | None:
        """Token that the template writes after the last turn of a history, by default an answer's; None: it has none.

        It may be the one that begins the next message, as with GLM: then the checkpoint stops at that.
        """
        asked = messages or [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        next_message: dict[str, Any] = {"role": "user", "content": NEXT}
        if calls := asked[-1].get("tool_calls"):
            name, call_id = calls[0]["function"]["name"], calls[0]["id"]
            next_message = {"role": "tool", "content": NEXT, "name": name, "tool_call_id": call_id}
        for whole in (list(asked), [*asked, next_message]):
            for text in self.texts(whole):
                last = self.last(text, asked[-1])
                stop = self.end_after(text, last)
                if stop is not None and (NEXT not in text or stop <= text.rindex(NEXT)):
                    found: str = next(end for end in self.ends if text.endswith(end, 0, stop))
                    return found
        return None

    def last(self, text: str, message: Mapping[str, Any]) -> int:
        """Position behind the last content of a message in a text."""
        content = str(split_think(message).get("content") or "").strip()
        words = [content, *(call["function"]["name"] for call in message.get("tool_calls", ()))]
        return max((text.rfind(word) + len(word) for word in words if word and word in text), default=0)

    def samples(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        switches: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        """The last message as the model would sample it after the prompt of the others, cut from the rendered text."""
        found = []
        for prompt in self.texts(messages[:-1], tools, switches, generation=True):
            for text in self.texts(messages, tools, switches):
                sample = self._sample(prompt, text, messages)
                if sample is not None and sample not in found:
                    found.append(sample)
        return found

    def trained(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, list[str]] | None:
        """Text and trained spans by TRL's training template; None if there is none or it cannot show the history."""
        if self._trained is None or not self.texts(messages, tools):
            return None
        for form in (form for forms in _forms(messages, False) for form in forms):
            try:
                found = self._trained.apply_chat_template(
                    form, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
            except Exception:
                continue
            ids, mask = found["input_ids"], found["assistant_masks"]
            text = self.text(ids)
            if _shows(text, messages, form):
                return text, [self.text(ids[start:stop]) for start, stop in runs(mask)]
        return None

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, switches: Mapping[str, Any] | None, generation: bool
    ) -> str | None:
        options: dict[str, Any] = {"add_generation_prompt": generation, "tokenize": False, **(switches or {})}
        for given in (tools, [] if tools is None else tools):  # templates for tools only need a list
            try:
                return str(self.tokenizer.apply_chat_template(copy.deepcopy(messages), tools=given, **options))
            except Exception:  # templates raise errors of any class
                continue
        return None

    def _sample(self, prompt: str, text: str, messages: Messages) -> Sample | None:
        shared = self._shared(prompt, text)
        rest, turn, reasoning, before = prompt[shared:], text[shared:], None, ""
        told = str(split_think(messages[-1]).get("reasoning_content") or "").strip()
        if told and prompt.rstrip().endswith((*REASONING_TAGS.values(), "<channel|>")):
            return None  # the prompt has closed it
        header = self.header() if not rest.strip() else rest
        opened = max(((header.rfind(tag), tag) for tag in REASONING_TAGS if tag in header), default=None)
        if opened is not None:
            close = REASONING_TAGS[opened[1]]
            first = turn[: self._first(turn, messages[-1])]
            if close in header[opened[0] :]:
                if told:
                    return None  # reasoning after a prompt that has closed it
                if rest.strip():
                    turn = turn.lstrip().removeprefix(close)
            elif close not in first:
                if told:
                    return None  # the template shows it otherwise than the prompt has opened it
                reasoning = "I see."
                before = f"{reasoning}\n{close}\n\n" if close == "</think>" else f"{reasoning}{close}"
        elif rest.strip() and not self.header().strip().endswith(rest.strip()):
            closed = any(close in rest for close in (*REASONING_TAGS.values(), "<channel|>"))
            if told or not closed:
                return None
        stop = self.end_after(turn, self.last(turn, messages[-1]))
        if stop is None:
            turn = turn.rstrip() + (self.end(messages) or self.tokenizer.eos_token)
        return Sample(prompt, before + turn[:stop], turn[:stop], reasoning)

    def _first(self, turn: str, message: Mapping[str, Any]) -> int:
        """Position of the first content or call in a turn."""
        content = str(split_think(message).get("content") or "").strip()
        words = [content, *(call["function"]["name"] for call in message.get("tool_calls", ()))]
        return min((turn.find(word) for word in words if word and word in turn), default=len(turn))

    def _shared(self, prompt: str, text: str) -> int:
        """Length of the common start, which splits no marker."""
        length = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), None)
        length = min(len(prompt), len(text)) if length is None else length
        if length == len(prompt):
            return length
        for marker in self.tokenizer.get_added_vocab():
            for side in (prompt, text):
                start = side.rfind(marker, max(0, length - len(marker) + 1), length + len(marker) - 1)
                if start >= 0 and start < length < start + len(marker):
                    length = start
        return length


def runs(mask: Sequence[Any]) -> list[tuple[int, int]]:
    """Starts and ends of the stretches that are true."""
    found, start = [], None
    for place, value in enumerate([*mask, False]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            found.append((start, place))
            start = None
    return found


def split_think(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with reasoning between tags in its content moved to `reasoning_content`."""
    content = message.get("content")
    if message["role"] == "assistant" and isinstance(content, str) and content.lstrip().startswith("<think>"):
        reasoning, _, answer = content.lstrip().removeprefix("<think>").partition("</think>")
        return {**message, "content": answer.strip(), "reasoning_content": reasoning.strip()}
    return dict(message)


def _forms(messages: Messages, as_system: bool) -> Iterator[list[list[dict[str, Any]]]]:
    """Groups of forms of a history; forms of one group are equally good."""
    objects = [_with_arguments(message, as_json=False) for message in messages]
    strings = [_with_arguments(message, as_json=True) for message in messages]
    named = _with_named_ids(objects)
    for arguments, in_parts, developer in product((objects, strings, named), (False, True), (False, True)):
        if arguments is not objects and not any(message.get("tool_calls") for message in messages):
            continue
        if developer and not (as_system and any(message["role"] == "developer" for message in messages)):
            continue
        forms = []
        for split, empty in product((False, True), ("", None, "absent")):
            form = []
            for message in arguments:
                one = dict(split_think(message) if split else message)
                if developer and one["role"] == "developer":
                    one["role"] = "system"
                for key in REASONING_KEYS:
                    if "reasoning_content" in one:
                        one[key] = one["reasoning_content"]
                if one.get("tool_calls") and not one.get("content"):
                    one["content"] = empty
                    if empty == "absent":
                        del one["content"]
                if in_parts and isinstance(one.get("content"), str):
                    one["content"] = [{"type": "text", "text": one["content"]}]
                form.append(one)
            if form not in forms:
                forms.append(form)
        only_first = [[_one_key(message) for message in form] for form in forms[:1]]
        yield [*forms, *(form for form in only_first if form not in forms)]


def _probe(form: Messages) -> list[dict[str, Any]]:
    """The history with other names of the called functions."""
    found = copy.deepcopy([dict(message) for message in form])
    for message in found:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"].replace(call["function"]["name"], call["function"]["name"] + PROBE)
            call["function"]["name"] += PROBE
    return found


def _one_key(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in REASONING_KEYS[1:]}


def _with_arguments(message: Mapping[str, Any], *, as_json: bool) -> dict[str, Any]:
    found = copy.deepcopy(dict(message))
    for call in found.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        call["function"]["arguments"] = json.dumps(value, ensure_ascii=False) if as_json else value
    return found


def _with_named_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The history with ids as Kimi K2's guide for tool calls asks for; its template shows ids and no names."""
    found, ids = copy.deepcopy([dict(message) for message in messages]), dict[str, str]()
    for message in found:
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = call["id"] = f"functions.{call['function']['name']}:{len(ids)}"
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return found


def _shows(text: str, messages: Messages, form: Messages) -> bool:
    """Whether a text has the contents, the calls with their arguments, and the last message's reasoning."""
    for place, message in enumerate(messages):
        whole = split_think(message)
        wanted = [str(whole.get("content") or "").strip()]
        if place == len(messages) - 1:
            wanted.append(str(whole.get("reasoning_content") or "").strip())
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            if str(arguments) in text and json.dumps(arguments) != str(arguments):
                return False  # Python's own notation of an object, which no model was trained on
            wanted += [call["function"]["name"], *_leaves(arguments)]
        if not all(any(spelling in text for spelling in _spellings(word)) for word in wanted):
            return False
    if "{'type': 'text'" in text:
        return False  # a list of parts, printed
    nothing = any(message.get("content", "") is None for message in form)
    return not (nothing and "None" in text and not any("None" in str(message) for message in messages))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *_leaves(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value.strip()


def _spellings(word: str) -> set[str]:
    """The word as it is, and as in JSON and Python text."""
    quoted = {json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1], repr(word)[1:-1]}
    html = (
        json.dumps(word).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("'", "\\u0027")
    )
    return {word, *quoted, html[1:-1]}
