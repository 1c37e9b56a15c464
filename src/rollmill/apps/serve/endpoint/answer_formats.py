"""Grammars of answers: `response_format`, and calls that `tool_choice` asks for, for constrained decoding.

Grammars are in llguidance's variant of Lark, where `%json` holds a JSON schema.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rollmill.apps.serve.endpoint.call_patterns import CallPattern, call_pattern, call_rule
from rollmill.apps.serve.endpoint.protocol import ApiError, ChatCompletionRequest
from rollmill.apps.serve.endpoint.session import requested_tools
from rollmill.data.renderer import Renderer
from rollmill.errors import ConfigError
from rollmill.rollout.chat import ChatRenderer

if TYPE_CHECKING:
    from rollmill.engines.logits_processors import CompiledGrammar, GrammarCompiler

_MOST_GRAMMARS = 32
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x09]{1,40}"}
"""Bounded, since a policy may otherwise write white space to the end."""
_FORMATS = "`response_format` is {type: text}, {type: json_object} or {type: json_schema, json_schema: {schema: ...}}"


class GrammarCache:
    """Compiles grammars for a model's tokenizer, in threads, and keeps the latest ones."""

    def __init__(self, chat: ChatRenderer, threads: Executor) -> None:
        self._chat, self._threads = chat, threads
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    async def get(self, lark: str) -> CompiledGrammar:
        """The compiled grammar. Raises ApiError if the library is missing, or does not support it."""
        found = self._compiled.pop(lark, None)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, partial(self._compile, lark))
        self._compiled[lark] = found
        while len(self._compiled) > _MOST_GRAMMARS:
            self._compiled.popitem(last=False)
        return found

    def _compile(self, lark: str) -> CompiledGrammar:
        from rollmill.engines.logits_processors import GrammarCompiler

        try:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._chat.tokenizer, sorted(self._chat.eos_ids))
            return self._compiler.compile(lark)
        except ConfigError as error:
            raise ApiError(str(error), code="unsupported_parameter") from error
        except ValueError as error:
            raise ApiError(f"the schema is not supported: {error}", code="invalid_value") from error


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of a request's answers: of a JSON schema, or calls of some tools, or either."""

    schema: dict[str, Any] | None
    functions: list[dict[str, Any]]
    forced: bool  #: the answer is calls
    single: bool  #: one call

    def grammar(self, renderer: Renderer, *, opened: bool) -> str:
        """The grammar. Raises ApiError if the model's own format of calls cannot be forced.

        Args:
            opened: the prompt has opened the reasoning, which comes first.
        """
        pattern = call_pattern(renderer) if self.functions else None
        if pattern is None and self.forced:
            text = (
                "the model's own format of tool calls is not JSON between marks, so calls cannot be forced; "
                "use `tool_choice`: auto"
            )
            raise ApiError(text, code="unsupported_parameter", param="tool_choice")
        kinds = [] if self.forced else ["answer"]
        lines = [] if self.forced else [f"answer: {_json_rule(self.schema)}"]
        if pattern is not None:
            kinds.append("calls")
            lines += _call_rules(renderer, pattern, self.functions, self.single)
        thought = f"{_thought_rule(renderer)} " if opened else ""
        return "\n".join([f"start: {thought}({' | '.join(kinds)})", *lines])


def answer_format(body: ChatCompletionRequest) -> AnswerFormat | None:
    """The form that a request asks for; None for any text. Raises ApiError for a format or choice that is wrong.

    Forced calls are in the model's own format, else in that of Hermes. With `tool_choice: auto` and a format, the
    answer is either of it or calls.
    """
    schema, tools = _schema(body.response_format), requested_tools(body) or []
    chosen = _chosen(body.tool_choice, [tool["function"]["name"] for tool in tools])
    if chosen is None and schema is None:
        return None
    functions = [tool["function"] for tool in tools if chosen is None or tool["function"]["name"] in chosen]
    for function in functions:
        if not isinstance(function.get("parameters") or {}, dict):
            text = f"`parameters` of {function['name'][:64]!r} is not a JSON schema"
            raise ApiError(text, code="invalid_value", param="tools")
    single = body.parallel_tool_calls is False or isinstance(body.tool_choice, dict)
    return AnswerFormat(schema, functions, chosen is not None, single)


def _schema(format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema of a format; None for text. Where it stands differs between OpenAI's interfaces."""
    if format is None or format == {"type": "text"}:
        return None
    if format.get("type") == "json_object":
        return {"type": "object"}
    inside = format.get("json_schema", format)
    schema = inside.get("schema") if isinstance(inside, dict) else None
    if format.get("type") != "json_schema" or not isinstance(schema, dict):
        raise ApiError(_FORMATS, code="invalid_value", param="response_format")
    return schema


def _chosen(choice: Any, names: Sequence[str]) -> set[str] | None:
    """Names of the tools of which one has to be called; None if none has to be."""
    if choice in (None, "none", "auto"):
        return None
    name = choice.get("function", {}) if isinstance(choice, dict) else None
    name = name.get("name") if isinstance(name, dict) else None
    if choice == "required" and names:
        return set(names)
    if isinstance(name, str) and choice.get("type") == "function" and name in names:
        return {name}
    text = "`tool_choice` is `auto`, `none`, `required`, or {type: function, function: {name: ...}} of one of `tools`"
    raise ApiError(text, code="invalid_value", param="tool_choice")


def _call_rules(
    renderer: Renderer, pattern: CallPattern, functions: Sequence[dict[str, Any]], single: bool
) -> list[str]:
    calls = [f"call{number}" for number in range(len(functions))]
    more = "" if single or pattern.gap is None else f" ({call_rule(renderer, pattern.gap)} call)*"
    lines = [f"calls: call{more}", f"call: {call_rule(renderer, pattern.begin)} ({' | '.join(calls)}) last"]
    lines.append(f"last: {call_rule(renderer, pattern.end)}")
    for name, function in zip(calls, functions, strict=True):
        written = function["name"]
        if pattern.quoted:
            written = json.dumps(written, ensure_ascii=False)[1:-1]
        lines.append(f"{name}: {_literal(written)} {call_rule(renderer, pattern.between)} {name}_args")
        lines.append(f"{name}_args: {_json_rule({'type': 'object'} | (function.get('parameters') or {}))}")
    return lines


def _thought_rule(renderer: Renderer) -> str:
    """The rest of a reasoning that the prompt has opened; none where its end is no token of its own."""
    end = renderer.template.reasoning_tags[1]
    if end.strip() not in renderer.template.special_tokens:
        return call_rule(renderer, end.lstrip())
    return f"/([^<]|<[^\\/])*/ {call_rule(renderer, end.strip())} /\\n{{0,2}}/"


def _json_rule(schema: dict[str, Any] | None) -> str:
    try:
        return f"%json {json.dumps({**(schema or {}), 'x-guidance': _JSON_OPTIONS})}"
    except (ValueError, RecursionError):
        text = "the schema is nested too deeply; use fewer levels"
        raise ApiError(text, code="invalid_value", param="response_format") from None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
