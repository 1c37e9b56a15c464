"""Histories, tools and arguments that every template is judged on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from bench.chat_templates.oracle import ANSWER, NEXT, QUESTION

Message = dict[str, Any]

REASONING = "Two and three make five."
CALLING = "The tool knows it."
USER: Message = {"role": "user", "content": QUESTION}
SYSTEM: Message = {"role": "system", "content": "Reply in one sentence."}
DEVELOPER: Message = {"role": "developer", "content": "Reply in one sentence."}
ASSISTANT: Message = {"role": "assistant", "content": ANSWER}
REASONED: Message = {**ASSISTANT, "reasoning_content": REASONING}
TAGGED: Message = {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"}
ASKED_AGAIN: Message = {"role": "user", "content": NEXT}
SECOND: Message = {"role": "assistant", "content": "That makes 6."}
RESULT = "It rains in the city."

PROMPTS: dict[str, list[Message]] = {
    "user": [USER],
    "system and user": [SYSTEM, USER],
    "developer and user": [DEVELOPER, USER],
    "unicode": [{"role": "user", "content": "¿Cuánto es 2 + 3? 二加三 🙂 👩‍👩‍👧"}],
    "white space": [{"role": "user", "content": "\n  How much is 2 + 3?\n\n "}],
}
DEMONSTRATIONS: dict[str, list[Message]] = {
    "answer": [USER, ASSISTANT],
    "answer after a system message": [SYSTEM, USER, ASSISTANT],
    "unicode": [USER, {"role": "assistant", "content": "答案是 5 🙂"}],
    "white space": [USER, {"role": "assistant", "content": "\n It is 5.\n"}],
}
SWITCHES: dict[str, tuple[Any, ...]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning_effort": ("low", "high"),
    "preserve_thinking": (True,),
    "clear_thinking": (False,),
}


def _schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:1]}


def _parameter(description: str, *types: str) -> dict[str, Any]:
    return {"type": types[0] if len(types) == 1 else list(types), "description": description}


WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Forecast for a city.",
        "parameters": _schema(
            city=_parameter("Name of the city.", "string"),
            days=_parameter("Number of days.", "integer"),
            ratio=_parameter("A share.", "number"),
            exact=_parameter("Whether to round.", "boolean"),
            note=_parameter("Number of a remark.", "integer", "null"),
            options={**_schema(unit=_parameter("Unit of the result.", "string")), "description": "More settings."},
            tags={"type": "array", "items": {"type": "string"}, "description": "Labels."},
        ),
    },
}
CLOCK_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_clock", "description": "Time of day now.", "parameters": _schema()},
}
TOOLS = [WEATHER_TOOL, CLOCK_TOOL]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "text and a number": {"city": "Paris", "days": 3},
    "numbers, true and null": {"city": "Oslo", "days": -2, "ratio": 0.5, "exact": True, "note": None},
    "nested": {"city": "Rome", "options": {"unit": "C", "parts": ["wind", {"deep": 1}]}, "tags": ["dry", "hot"]},
    "quotes": {"city": 'He said "hi", it\'s a \\ sign'},
    "lines": {"city": "one\ntwo\n\n  three"},
    "unicode": {"city": "Zürich 東京 🙂"},
    "a number as text": {"city": "5"},
    "tag that closes a call": {"city": "go </tool_call> on"},
    "tag that closes reasoning": {"city": "go </think> on"},
}
#: Arguments that no token-wise reading can tell from the format's own marks: an error is right, too.
HARD = ("tag that closes a call", "tag that closes reasoning")


def call(arguments: Mapping[str, Any], name: str = "get_weather", number: int = 1) -> dict[str, Any]:
    """A call in OpenAI's format, with an id that all families take (Mistral: nine letters and digits)."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": text}}


def calling(*calls: dict[str, Any], content: str = "") -> Message:
    """The assistant's message with these calls."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(of: Mapping[str, Any], content: str = RESULT) -> Message:
    """The tool's message for a call."""
    return {"role": "tool", "name": of["function"]["name"], "tool_call_id": of["id"], "content": content}


FIRST_CALL = call(ARGUMENTS["text and a number"])
SECOND_CALL = call({"city": "Oslo", "days": 2}, number=2)
CLOCK_CALL = call({}, "get_clock")
CALLS: dict[str, list[Message]] = {
    "one call": [USER, calling(FIRST_CALL)],
    "call after text": [USER, calling(FIRST_CALL, content=CALLING)],
    "call after reasoning": [USER, {**calling(FIRST_CALL), "reasoning_content": REASONING}],
    "call without arguments": [USER, calling(CLOCK_CALL)],
    "two calls": [USER, calling(FIRST_CALL, SECOND_CALL)],
    **{f"arguments: {name}": [USER, calling(call(arguments))] for name, arguments in ARGUMENTS.items()},
}
LOOP: list[Message] = [USER, calling(FIRST_CALL), result(FIRST_CALL), {"role": "assistant", "content": "Take a coat."}]


def switches_of(template: str) -> list[dict[str, Any]]:
    """Settings of the switches that a template reads: variables that it does not set itself before."""
    plain = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", template)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    read = jinja2.meta.find_undeclared_variables(environment.parse(plain))
    return [{name: value} for name in SWITCHES if name in read for value in SWITCHES[name]]


def cut_tags(turn: str, tags: Sequence[str] = ("</tool_call>", "</think>")) -> list[str]:
    """The turn in parts, so that a tag within the argument `go TAG on` is no single token."""
    for tag in tags:
        if f"go {tag} on" in turn:
            before, after = turn.split(f"go {tag} on", 1)
            return [f"{before}go {tag[:5]}", f"{tag[5:]} on{after}"]
    return [turn]


def not_escaped(message: Mapping[str, Any], turn: str) -> bool:
    """Whether the template wrote a text with quotes or line breaks between quotes as it is, which nothing can read."""
    values = [json.loads(call["function"]["arguments"]).get("city", "") for call in message.get("tool_calls", ())]
    return any(f"='{value}'" in turn for value in values if "'" in value or "\n" in value)
