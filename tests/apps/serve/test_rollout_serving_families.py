"""Calls and reasoning in the native formats of model families, as the official clients see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.endpoints import KEY, Running, running
from support.toys import toy_model

from bench.chat_templates import corpus
from bench.chat_templates.tokenizers import stand_in
from rollmill.apps.serve.endpoint.reply_stream import ReplyStream, opens_reasoning, reply_marks
from rollmill.data.renderer import Renderer, renderer_of
from rollmill.engines.native import NativeEngine

if TYPE_CHECKING:
    import anthropic

CONTEXT = 4096
HI: list[Any] = [{"role": "user", "content": "Will it rain?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "enum": [3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "Forecast.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = {"city": "Paris", "days": 3}
CALL = {"id": "call00000", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
THOUGHT, RAIN, RESULT = "Let me see, it may.", "It rains in Paris.", "Rain."


@dataclass(frozen=True)
class Family:
    """A family's template.

    Attributes:
        thinks: turns have reasoning.
        call: a turn with a call that the template writes for no last turn, as the model writes it.
        json: calls are JSON between marks, and can be forced.
    """

    name: str
    thinks: bool
    call: str = ""
    json: bool = False


FAMILIES = {
    each.name: each
    for each in (
        Family("qwen3", True, json=True),
        Family("qwen3_5_think", True),
        Family("gptoss", True),
        Family("glm4moe", True),
        Family("llama3_1", False, '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', json=True),
        Family("MiniMax-M2", True),
        Family("moonshotai-Kimi-K2", False),
        Family(
            "Mistral-Small-3.2-24B-Instruct-2506",
            False,
            '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris", "days": 3}',
            json=True,
        ),
    )
}
ALL = pytest.mark.parametrize("name", FAMILIES)


@cache
def tokenizer_of(name: str) -> tuple[Any, frozenset[int]]:
    """The stand-in tokenizer of a family, and the ids that end its turns."""
    try:
        return stand_in(corpus.template(name))
    except KeyError:
        pytest.skip(f"the template {name} is not here: {corpus.absent()}")


def renderer_for(name: str) -> Renderer:
    """Its renderer."""
    tokenizer, ends = tokenizer_of(name)
    tokenizer.stop_ids = ends
    return renderer_of(tokenizer)


def turn_ids(name: str, turn: dict[str, Any], text: str = "") -> list[int]:
    """Tokens of a turn as the template writes it, or as the text says."""
    renderer = renderer_for(name)
    if text:
        return [*renderer.encode(text), renderer.tokenizer.convert_tokens_to_ids(renderer.template.call_end)]
    ids, mask = renderer.demonstration([*HI, turn], 1, TOOLS)
    return [token for token, learned in zip(ids, mask, strict=True) if learned]


def says_of(family: Family) -> list[list[int]]:
    """A call, then an answer."""
    thought = {"reasoning_content": THOUGHT} if family.thinks else {}
    calling = turn_ids(family.name, {"role": "assistant", "content": "", **thought, "tool_calls": [CALL]}, family.call)
    text = "" if family.thinks else RAIN
    return [calling, turn_ids(family.name, {"role": "assistant", "content": RAIN, **thought}, text)]


@contextmanager
def serving(name: str, says: list[list[int]], **options: Any) -> Iterator[Running]:
    """A server over a toy model with the family's tokenizer, which says this."""
    tokenizer, ends = tokenizer_of(name)
    model = toy_model("qwen3", len(tokenizer), max_position_embeddings=CONTEXT)
    engine = NativeEngine(model, tokenizer, eos_ids=ends, context=CONTEXT)
    with running(says, made=(engine, tokenizer), **{"max_new_tokens": 300} | options) as site:
        yield site


def client(site: Running, session: str | None = "s") -> openai.OpenAI:
    key = KEY if session is None else f"{KEY}:{session}"
    return openai.OpenAI(base_url=site.base_url, api_key=key, max_retries=0)


def anthropic_client(site: Running) -> anthropic.Anthropic:
    import anthropic  # here, since it takes long, and every process of pytest collects this file

    return anthropic.Anthropic(base_url=site.address, api_key=f"{KEY}:s", max_retries=0)


def post(site: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(site.address + path, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)


def continues(site: Running, says: list[list[int]]) -> None:
    """The session's second prompt begins with exactly the tokens of the first one and its completion."""
    first, second = (call.completion for call in site.session("s").recorder.calls)
    assert [each.token_ids.tolist() for each in (first, second)] == says
    known = [*first.prompt_ids.tolist(), *says[0]]
    assert second.prompt_ids.tolist()[: len(known)] == known


@ALL
@pytest.mark.parametrize(("stream", "sent_back"), [(False, True), (True, False)])
def test_a_chat_has_native_calls_and_reasoning(name: str, stream: bool, sent_back: bool) -> None:
    family = FAMILIES[name]
    says, thought = says_of(family), THOUGHT if family.thinks else None
    with serving(name, says) as site:
        ask, messages, found = client(site).chat.completions, list(HI), []
        for _ in says:
            options: Any = {"model": "", "messages": messages, "tools": TOOLS}
            if stream:
                with ask.stream(**options) as events:
                    choice: Any = events.get_final_completion().choices[0]
            else:
                choice = ask.create(**options).choices[0]
            message = choice.message
            calls = message.tool_calls or []
            found.append((message.content or None, len(calls), choice.finish_reason))
            assert getattr(message, "reasoning_content", None) == getattr(message, "reasoning", None) == thought
            left_out = {"parsed"} | (set() if sent_back else {"reasoning_content", "reasoning"})
            messages.append(message.model_dump(exclude_none=True, exclude=left_out))
            for each in calls:
                assert (each.function.name, json.loads(each.function.arguments)) == ("get_weather", ARGUMENTS)
                messages.append({"role": "tool", "tool_call_id": each.id, "name": "get_weather", "content": RESULT})
        assert found == [(None, 1, "tool_calls"), (RAIN, 0, "stop")]
        continues(site, says)


def test_of_turns_that_differ_in_reasoning_the_one_sent_back_goes_on() -> None:
    """Both are the same to a client that leaves the reasoning out."""
    says = [
        turn_ids("qwen3", {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [CALL]})
        for thought in ("One thought.", "Another thought.")
    ]
    with serving("qwen3", says) as site:
        ask = client(site).chat.completions.create
        messages = [ask(model="", messages=HI, tools=TOOLS).choices[0].message for _ in says]
        for message, ids in zip(messages, says, strict=True):
            assert message.tool_calls is not None
            result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
            history: list[Any] = [*HI, message.model_dump(exclude_none=True), result]
            ask(model="", messages=history, tools=TOOLS, max_tokens=1)
            prompt_ids = site.session("s").recorder.calls[-1].completion.prompt_ids.tolist()
            first = site.session("s").recorder.calls[0].completion.prompt_ids.tolist()
            assert prompt_ids[: len(first) + len(ids)] == [*first, *ids]


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_gets_blocks_of_thinking(name: str, stream: bool) -> None:
    family = FAMILIES[name]
    says, thinking = says_of(family), ["thinking"] if family.thinks else []
    tools = [{"name": "get_weather", "description": "Forecast.", "input_schema": SCHEMA}]
    with serving(name, says) as site:
        messages, kinds = list(HI), []
        for _ in says:
            options: Any = {"model": "", "max_tokens": 300, "messages": messages, "tools": tools}
            if stream:
                with anthropic_client(site).messages.stream(**options) as events:
                    answer = events.get_final_message()
            else:
                answer = anthropic_client(site).messages.create(**options)
            kinds.append([block.type for block in answer.content])
            for block in answer.content:
                if block.type == "thinking":
                    assert block.thinking == THOUGHT
                    assert block.signature
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            uses: list[Any] = [block for block in answer.content if block.type == "tool_use"]
            assert [use.input for use in uses] == [ARGUMENTS] * len(uses)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": RESULT} for use in uses]
            messages.append({"role": "user", "content": results})
        assert kinds == [[*thinking, "tool_use"], [*thinking, "text"]]
        continues(site, says)


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_items_of_reasoning(name: str, stream: bool) -> None:
    family = FAMILIES[name]
    says, reasoning = says_of(family), ["reasoning"] if family.thinks else []
    tools: list[Any] = [{"type": "function", "strict": True, **FUNCTION}]
    with serving(name, says) as site:
        items, kinds = list(HI), []
        for _ in says:
            options: Any = {"model": "", "input": items, "tools": tools}
            if stream:
                with client(site).responses.stream(**options) as events:
                    events.until_done()
                    made: Any = events.get_final_response()
            else:
                made = client(site).responses.create(**options)
            kinds.append([item.type for item in made.output])
            thoughts = [item.content[0].text for item in made.output if item.type == "reasoning"]
            assert thoughts == [THOUGHT] * len(reasoning)
            calls = [item for item in made.output if item.type == "function_call"]
            items += [item.to_dict() for item in made.output]
            items += [{"type": "function_call_output", "call_id": each.call_id, "output": RESULT} for each in calls]
        assert kinds == [[*reasoning, "function_call"], [*reasoning, "message"]]
        continues(site, says)


def test_streamed_items_are_those_of_the_response() -> None:
    says = says_of(FAMILIES["qwen3"])
    with serving("qwen3", says[1:]) as site:
        events = list(client(site).responses.create(model="", input=HI, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "reasoning_text.delta", "reasoning_text.done",
        "output_item.done", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "completed",
    ]  # fmt: skip
    assert kinds.count("reasoning_text.delta") > 1
    assert kinds.count("output_text.delta") > 1
    done: list[Any] = [event for event in events if event.type == "response.output_item.done"]
    last: Any = events[-1]
    assert [event.item.to_dict() for event in done] == [item.to_dict() for item in last.response.output]
    assert [event.output_index for event in done] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe"])
def test_unfinished_reasoning_is_no_answer(name: str, stream: bool) -> None:
    opened = opens_reasoning(renderer_for(name), renderer_for(name).prompt(HI, TOOLS).token_ids)
    text = f"{THOUGHT} <tool_call>" if opened else f"<think>{THOUGHT} <tool_call>"
    ids = renderer_for(name).encode(text)[:-1]
    with serving(name, [ids]) as site:
        body = {"messages": HI, "tools": TOOLS, "max_tokens": len(ids), "stream": stream}
        answer = post(site, "/v1/chat/completions", body)
        if stream:
            lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            deltas = [line["choices"][0]["delta"] for line in lines]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
            assert not any(delta.get("content") or "tool_calls" in delta for delta in deltas)
            assert lines[-1]["choices"][0]["finish_reason"] == "length"
        else:
            [choice] = answer.json()["choices"]
            message = choice["message"]
            assert (message["content"], message["reasoning_content"], message["tool_calls"]) == ("", THOUGHT, None)
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "moonshotai-Kimi-K2"])
def test_a_call_that_is_cut_off_is_said_and_counted(name: str) -> None:
    family = FAMILIES[name]
    calling = {"role": "assistant", "content": "I see.", "tool_calls": [CALL]}
    calling |= {"reasoning_content": THOUGHT} if family.thinks else {}
    ids = turn_ids(name, calling)
    ids = ids[: len(ids) - 5]
    with serving(name, [ids, ids]) as site:
        body = {"messages": HI, "tools": TOOLS, "max_tokens": len(ids)}
        [choice] = post(site, "/v1/chat/completions", body).json()["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["tool_calls"]) == ("length", None)
        assert len(message["tool_call_errors"]) == 1
        assert message["content"].startswith("I see.")
        assert "Paris" in message["content"]
        metrics = httpx.get(f"{site.address}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert 'rollmill_tool_call_errors_total{key="default"} 1.0' in metrics
        lines = post(site, "/v1/chat/completions", body | {"stream": True}).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
        assert deltas[-1]["tool_call_errors"] == message["tool_call_errors"]


@ALL
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_in_the_models_own_format_or_refused(name: str, choice: Any) -> None:
    with serving(name, []) as site:
        body = {"messages": HI, "tools": TOOLS, "tool_choice": choice, "n": 2, "parallel_tool_calls": False}
        answer = post(site, "/v1/chat/completions", body)
        if not FAMILIES[name].json:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
            assert "format of tool calls" in answer.json()["error"]["message"]
            return
        assert answer.status_code == 200, answer.text
        for each in answer.json()["choices"]:
            assert each["finish_reason"] == "tool_calls"
            [call] = each["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Oslo")
        assert post(site, "/v1/chat/completions", {"messages": HI, "tools": TOOLS, "max_tokens": 4}).status_code == 200


def test_a_format_follows_the_reasoning_that_the_prompt_opens() -> None:
    with serving("qwen3_5_think", []) as site:
        schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
        end = renderer_for("qwen3_5_think").tokenizer.convert_tokens_to_ids("</think>")
        body = {
            "messages": HI,
            "response_format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}},
            "logit_bias": {str(end): 8},
        }
        [choice] = post(site, "/v1/chat/completions", body).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(choice["message"]["content"])["sure"], bool)


def test_one_call_at_most_is_the_first_of_a_native_format() -> None:
    other = {**CALL, "id": "call00001", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}}
    turn = {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": [CALL, other]}
    for name, stops in (("qwen3", True), ("qwen3_5_think", False)):
        ids = turn_ids(name, turn)
        with serving(name, [ids]) as site:
            ask = client(site).chat.completions.create
            message = ask(model="", messages=HI, tools=TOOLS, parallel_tool_calls=False).choices[0].message
            assert message.tool_calls is not None
            assert [json.loads(each.function.arguments) for each in message.tool_calls] == [ARGUMENTS]  # type: ignore[union-attr]
            said = site.session("s").recorder.calls[0].completion.token_ids.tolist()
            assert (said != ids) == stops
            assert said == ids[: len(said)]


def prompt_of(site: Running, **body: Any) -> str:
    """The text of a request's prompt."""
    asked = {"messages": HI, "max_tokens": 1, "return_token_ids": True} | body
    answer = post(site, "/v1/chat/completions", asked)
    assert answer.status_code == 200, answer.text
    return site.service.chat.decode(answer.json()["prompt_token_ids"])


CLOSED = "<think>\n\n</think>\n\n"


def test_hints_on_thinking_are_switches_of_templates_that_read_them() -> None:
    with serving("qwen3", []) as site:
        assert not prompt_of(site).endswith(CLOSED)
        assert prompt_of(site, reasoning_effort="none").endswith(CLOSED)
        assert prompt_of(site, thinking={"type": "disabled"}).endswith(CLOSED)
        assert prompt_of(site, chat_template_kwargs={"enable_thinking": False, "unknown": 1}).endswith(CLOSED)
        assert not prompt_of(site, reasoning_effort="low").endswith(CLOSED)
        counts = []
        for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            body = {"messages": HI, "thinking": thinking}
            counted = post(site, "/v1/messages/count_tokens", body).json()["input_tokens"]
            used = post(site, "/v1/messages", body | {"max_tokens": 1}).json()["usage"]["input_tokens"]
            counts.append((counted, used))
        assert counts[0][0] == counts[0][1] > counts[1][0] == counts[1][1] == counts[2][0] == counts[2][1]
        low = {"input": "hi", "reasoning": {"effort": "low"}, "max_output_tokens": 1}
        off = post(site, "/v1/responses", low | {"reasoning": {"effort": "none"}}).json()
        on = post(site, "/v1/responses", low).json()
        assert off["usage"]["input_tokens"] > on["usage"]["input_tokens"]
        assert on["reasoning"]["effort"] == "low"
    with serving("gptoss", []) as site:
        assert "Reasoning: high" in prompt_of(site, reasoning_effort="high")
        assert "Reasoning: medium" in prompt_of(site, thinking={"type": "disabled"})


def test_the_servers_switches_hold_unless_a_request_has_its_own() -> None:
    with serving("qwen3", [], switches={"enable_thinking": False}) as site:
        assert prompt_of(site).endswith(CLOSED)
        assert not prompt_of(site, chat_template_kwargs={"enable_thinking": True}).endswith(CLOSED)
        assert not prompt_of(site, reasoning_effort="high").endswith(CLOSED)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"tokenize": True}, "tokenize"),
        ({"enable_thinking": "x" * 5000}, "4096"),
    ],
)
def test_variables_that_are_none_of_the_template_are_refused(given: dict[str, Any], says: str) -> None:
    with serving("qwen3", []) as site:
        answer = post(site, "/v1/chat/completions", {"messages": HI, "chat_template_kwargs": given})
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


# -- streams ---------------------------------------------------------------------------------------------------

PIECES = (
    "It ", "rains", "\n", " ", "{", "[", '"name"', "```", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "</th", "<tool", "世界", "🙂", "STOP", "get_weather", '{"name": "get_weather", "arguments": {}}', "<|im_end|>",
    "<|channel|>final<|message|>", "<|tool_calls_section_begin|>", "[TOOL_CALLS]", "<minimax:tool_call>",
)  # fmt: skip


@ALL
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), tools=st.booleans(), whole=st.booleans())
def test_streamed_text_is_that_of_the_whole_answer(name: str, pieces: list[str], tools: bool, whole: bool) -> None:
    """For any split of a text in tokens: each piece is encoded alone, or its marks are spelled out."""
    renderer = renderer_for(name)
    backend = renderer.tokenizer.backend_tokenizer
    offered = TOOLS if tools else None
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if whole or number % 2:
            ids += renderer.encode(piece)
        else:
            ids += [token for part in piece for token in backend.encode(part, add_special_tokens=False).ids]
    prompt = renderer.prompt(HI, offered).token_ids
    marks, opened = reply_marks(renderer, tools), opens_reasoning(renderer, prompt)
    reply = renderer.parse(ids, prompt, offered)
    streams = [
        ReplyStream(renderer.tokenizer, [], marks, opened=opened, tools=tools) for _ in ("streamed", "not streamed")
    ]
    reasoning = content = ""
    for token in ids:
        new = streams[0].push(token)
        reasoning += new.reasoning
        assert not (new.reasoning and content), "reasoning comes first"
        content += new.content
    rest = streams[0].finish(reply)
    streams[1].finish(reply)
    assert (reasoning + rest.reasoning, content + rest.content) == (streams[1].reasoning, streams[1].content)
