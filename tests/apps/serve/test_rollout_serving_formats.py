"""Formats, forced calls, penalties and biases of requests, over a random model that would never keep to them itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from pydantic import BaseModel, ConfigDict
from support.endpoints import KEY, Running, running

from rollmill.apps.serve.endpoint.protocol import ChatCompletionRequest
from rollmill.apps.serve.endpoint.session import EndpointSession
from rollmill.config.rollout import SamplingConfig
from rollmill.errors import UnsupportedRequestError

HI: list[Any] = [{"role": "user", "content": "hi"}]
HEADERS = {"authorization": f"Bearer {KEY}"}


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Answer(BaseModel):
    """What a client wants to get: without limits a random model would write to its last token."""

    model_config = ConfigDict(extra="forbid")
    colour: Colour
    sure: bool


SCHEMA = Answer.model_json_schema()
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": 'o"dd', "parameters": {"type": "object", "properties": {}}}},
]
TOOLS[1]["function"]["parameters"]["additionalProperties"] = False


@pytest.fixture(scope="module")
def site() -> Iterator[Running]:
    with running(max_new_tokens=600, max_position_embeddings=2048) as made:
        yield made


def client(site: Running, session: str | None = None) -> openai.OpenAI:
    key = KEY if session is None else f"{KEY}:{session}"
    return openai.OpenAI(base_url=site.base_url, api_key=key, max_retries=0)


def post(site: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(site.address + path, json=body, headers=HEADERS, timeout=60)


def own_logprobs(site: Running, token_ids: Any) -> np.ndarray[Any, Any]:
    """The model's own log-probs of all tokens but the first, at temperature 1."""
    model: Any = site.service.engine.core.weights.model  # type: ignore[attr-defined]
    ids = torch.from_numpy(np.asarray(token_ids)).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
    found: np.ndarray[Any, Any] = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
    return found


def test_a_schema_is_followed_in_all_three_protocols(site: Running) -> None:
    import anthropic

    made = client(site).chat.completions.parse(model="", messages=HI, response_format=Answer, n=3)
    assert all(isinstance(choice.message.parsed, Answer) for choice in made.choices)
    assert {choice.finish_reason for choice in made.choices} == {"stop"}
    parsed = client(site).responses.parse(model="", input="hi", text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    asked: Any = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    answer = anthropic.Anthropic(base_url=site.address, api_key=KEY, max_retries=0).messages.create(
        model="", max_tokens=600, messages=HI, **asked
    )
    assert isinstance(Answer.model_validate_json(answer.content[0].model_dump()["text"]), Answer)


def test_a_schema_is_followed_in_a_stream_and_without_its_wrapper(site: Running) -> None:
    for inside in ({"schema": SCHEMA}, {"json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}):
        format = {"type": "json_schema", **inside}
        options: Any = {"model": "", "messages": HI, "response_format": format, "stream": True}
        pieces = client(site).chat.completions.create(**options)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert isinstance(Answer.model_validate_json(text), Answer)


def test_json_objects_begin_as_such(site: Running) -> None:
    """A random model may write one to the end of its tokens, but nothing else."""
    options: Any = {"model": "", "messages": HI, "response_format": {"type": "json_object"}, "max_tokens": 200, "n": 4}
    for choice in client(site).chat.completions.create(**options).choices:
        text = choice.message.content or ""
        assert text.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", 'o"dd'}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": 'o"dd'}}, {'o"dd'}),
    ],
)
def test_a_call_that_is_asked_for_comes(site: Running, choice: Any, names: set[str]) -> None:
    body = {"messages": HI, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "n": 8, "seed": 1}
    found = post(site, "/v1/chat/completions", body).json()["choices"]
    assert {each["finish_reason"] for each in found} == {"tool_calls"}
    assert [len(each["message"]["tool_calls"]) for each in found] == [1] * 8
    calls = [each["message"]["tool_calls"][0]["function"] for each in found]
    assert {call["name"] for call in calls} <= names
    for call in calls:
        arguments = json.loads(call["arguments"])
        assert arguments.get("city") in ("Rome", "Oslo") if call["name"] == "weather" else arguments == {}


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_an_answer_ends_after_the_first(stream: bool) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    listed = json.dumps([{"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Oslo")])
    says = [f"I see. {call}\n{call}", "Sunny.", listed, "Never mind."]
    with running(says, max_new_tokens=300, max_position_embeddings=2048) as site:
        messages, found = list(HI), []
        ask = client(site, "single").chat.completions
        for _ in says:
            options: Any = {"model": "", "messages": messages, "tools": TOOLS, "parallel_tool_calls": False}
            if stream:
                with ask.stream(**options) as events:
                    choice: Any = events.get_final_completion().choices[0]
            else:
                choice = ask.create(**options).choices[0]
            calls = choice.message.tool_calls or []
            found.append((choice.message.content or "", len(calls), choice.finish_reason))
            messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages += [{"role": "tool", "tool_call_id": each.id, "content": "It is sunny."} for each in calls]
            if not calls:
                messages.append({"role": "user", "content": "And?"})
        first, third = ("I see.", 1, "tool_calls"), ("", 1, "tool_calls")
        assert found == [first, ("Sunny.", 0, "stop"), third, ("Never mind.", 0, "stop")]
        session = site.session("single")
        assert len(session.recorder.calls) == 4
        assert post(site, "/feedback", {"session": "single", "reward": 1, "commit": True}).status_code == 200
        assert len(site.kept.finished[-1].experiences) == 1, "it is one trajectory"


def test_calls_are_asked_for_in_the_other_protocols(site: Running) -> None:
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    for choice in ("required", {"type": "function", "name": "weather"}):
        body = {"input": "hi", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        [call] = post(site, "/v1/responses", body).json()["output"]
        assert (call["type"], call["name"]) == ("function_call", "weather")
    function = TOOLS[0]["function"]
    own = [{"name": function["name"], "input_schema": function["parameters"]}]
    for named in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        asked = {"messages": HI, "max_tokens": 600, "tools": own, "tool_choice": named}
        asked["tool_choice"] = named | {"disable_parallel_tool_use": True}
        made = post(site, "/v1/messages", asked).json()
        assert made["stop_reason"] == "tool_use"
        [block] = made["content"]
        assert block["input"]["city"] in ("Rome", "Oslo")


def test_with_tools_and_a_format_an_answer_is_one_of_both(site: Running) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    body = {"messages": HI, "tools": TOOLS, "response_format": format, "n": 16, "seed": 2}
    found = post(site, "/v1/chat/completions", body).json()["choices"]
    kinds = {each["finish_reason"] for each in found}
    assert kinds <= {"stop", "tool_calls", "length"}
    for each in found:
        if each["finish_reason"] == "stop":
            assert isinstance(Answer.model_validate_json(each["message"]["content"]), Answer)
    assert "stop" in kinds


def test_the_recorded_log_probs_are_those_of_the_model_whatever_was_excluded(site: Running) -> None:
    """As with truncation: a session's experience has the log-probs that the trainer recomputes."""
    ask = client(site, "exact").chat.completions.create
    shape: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
    bias = {str(token): 5.0 for token in range(40, 60)}
    penalties: Any = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": bias}
    repeats = {"repetition_penalty": 1.5}
    ask(model="", messages=HI, temperature=1, logprobs=True, **shape)
    ask(model="", messages=HI, temperature=1, max_tokens=60, extra_body=repeats, **penalties)
    ask(model="", messages=HI, temperature=1, max_tokens=60, extra_body=repeats, **penalties, **shape)
    reward = {"session": "exact", "reward": 1, "commit": True}
    assert post(site, "/feedback", reward).status_code == 200
    experiences = site.kept.finished[-1].experiences
    assert len(experiences) == 3
    for one in experiences:
        own = own_logprobs(site, one.token_ids)
        mine = one.action_mask[1:]
        assert one.logprobs[1:][mine] == pytest.approx(own[mine], abs=2e-3)


def test_a_bias_bans_and_forces_tokens(site: Running) -> None:
    [token] = site.service.chat.encode("a")
    body = {"prompt": "hi", "max_tokens": 5, "logit_bias": {str(token): 100}}
    assert post(site, "/v1/completions", body).json()["choices"][0]["text"] == "aaaaa"
    greedy = {"messages": HI, "temperature": 0, "max_tokens": 1, "return_token_ids": True}
    first = post(site, "/v1/chat/completions", greedy).json()["choices"][0]["token_ids"][0]
    other = post(site, "/v1/chat/completions", greedy | {"logit_bias": {str(first): -100}}).json()
    assert other["choices"][0]["token_ids"][0] != first
    never = {"presence_penalty": 2, "frequency_penalty": 2, "temperature": 0, "max_tokens": 60}
    many = post(site, "/v1/chat/completions", greedy | never).json()["choices"][0]["token_ids"]
    plain = post(site, "/v1/chat/completions", greedy | {"max_tokens": 60}).json()["choices"][0]["token_ids"]
    assert len(set(many)) > len(set(plain))


def test_a_rollout_whose_sampling_is_fixed_keeps_formats_but_no_penalties(site: Running) -> None:
    session = EndpointSession("x", site.service.chat, SamplingConfig(), forced=True)
    body = ChatCompletionRequest.model_validate(
        {"messages": HI, "presence_penalty": 1.0, "logit_bias": {"3": 1.0}, "temperature": 0.5}
    )
    assert session.penalties(body).neutral
    assert session.settings(body, None).temperature == 1.0
    assert not EndpointSession("x", site.service.chat, SamplingConfig()).penalties(body).neutral


def test_without_the_library_formats_are_refused_with_what_to_install(
    site: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.service.grammars, "_compiler", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"messages": HI, "response_format": {"type": "json_schema", "schema": {"type": "boolean"}}}
    answer = post(site, "/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert "pip install 'rollmill[grammar]'" in answer.json()["error"]["message"]


def test_an_engine_that_cannot_change_what_it_samples_says_so(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(site.service.engine), "applies_processors", False)
    for change in ({"presence_penalty": 1}, {"response_format": {"type": "json_object"}}, {"logit_bias": {"3": 1}}):
        answer = post(site, "/v1/chat/completions", {"messages": HI} | change)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert "engine `native`" in answer.json()["error"]["message"]
    neutral = {"messages": HI, "presence_penalty": 0, "max_tokens": 4}
    assert post(site, "/v1/chat/completions", neutral).status_code == 200
    assert site.service.gate.under_way == 0


def test_a_request_that_the_engine_refuses_is_the_clients_error(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as truncation with vLLM: the engine has not failed."""

    def refuses(request: Any) -> Any:
        raise UnsupportedRequestError("use top_p 1")

    with monkeypatch.context() as patched:
        patched.setattr(site.service.engine, "stream", refuses)
        answer = post(site, "/v1/chat/completions", {"messages": HI, "top_p": 0.5})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert "use top_p 1" in answer.json()["error"]["message"]
    assert httpx.get(f"{site.address}/health").json()["status"] == "ok"
