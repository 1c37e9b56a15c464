"""The endpoint as OpenAI's own client sees it, against a real server over a toy model."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.endpoints import KEY, Running, running
from support.waiting import wait_until

from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.config.rollout import RepetitionConfig
from rollmill.types import Experience

HI: list[Any] = [{"role": "user", "content": "hi"}]
HEADERS = {"authorization": f"Bearer {KEY}"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
WRONG_SCHEMA = {"type": "json_schema", "schema": {"type": "nonsense"}}
DEEP: list[Any] = [
    {"type": "function", "function": {"name": "a", "parameters": json.loads('{"a":' * 300 + "1" + "}" * 300)}}
]


@pytest.fixture(scope="module")
def site() -> Iterator[Running]:
    with running() as made:
        yield made


def client(site: Running, session: str | None = None, **options: Any) -> openai.OpenAI:
    key = KEY if session is None else f"{KEY}:{session}"
    return openai.OpenAI(**{"base_url": site.base_url, "api_key": key, "max_retries": 0} | options)


def post(site: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(site.address + path, json=body, headers=HEADERS | headers)


def committed(site: Running, session: str, reward: float = 1.0) -> list[Experience]:
    """The experiences of a session, which is over."""
    answer = post(site, "/feedback", {"session": session, "reward": reward, "commit": True})
    assert answer.status_code == 200, answer.text
    return site.kept.finished[-1].experiences


def test_a_chat_is_answered_and_counted(site: Running) -> None:
    made = client(site).chat.completions.create(model="any", messages=HI, n=3, max_tokens=5, seed=7)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert made.usage is not None
    assert made.usage.completion_tokens == 15
    assert made.usage.total_tokens == made.usage.prompt_tokens + 15
    assert {choice.finish_reason for choice in made.choices} == {"length"}
    again = client(site).chat.completions.create(model="any", messages=HI, n=3, max_tokens=5, seed=7)
    assert [c.message.content for c in again.choices] == [c.message.content for c in made.choices]
    assert client(site).models.list().data[0].id == "toy"
    assert client(site).models.retrieve("toy").id == "toy"


def test_streamed_pieces_are_the_whole_and_carry_log_probs(site: Running) -> None:
    whole = client(site).chat.completions.create(model="", messages=HI, seed=3, logprobs=True, top_logprobs=4)
    pieces = list(
        client(site).chat.completions.create(
            model="", messages=HI, seed=3, logprobs=True, top_logprobs=4, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    choices = [piece.choices[0] for piece in pieces if piece.choices]
    assert "".join(each.delta.content or "" for each in choices) == whole.choices[0].message.content
    assert len([each for each in choices if each.delta.content]) > 3
    assert [each.finish_reason for each in choices][-1] == "length"
    assert pieces[-1].usage == whole.usage
    assert whole.choices[0].logprobs is not None
    streamed = [one for each in choices if each.logprobs for one in each.logprobs.content or []]
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == 16
    for one in streamed:
        top = [each.logprob for each in one.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert sum(map(math.exp, top)) <= 1
        assert one.logprob <= top[0] + 1e-4


def test_a_conversation_is_one_experience_with_the_tokens_that_were_answered(site: Running) -> None:
    messages, answered = list(HI), []
    for turn in range(3):
        extra: Any = {"return_token_ids": True}
        made = client(site, "talk").chat.completions.create(model="", messages=messages, extra_body=extra)
        choice = made.choices[0]
        answered.append(choice.token_ids)  # type: ignore[attr-defined]
        messages += [choice.message.model_dump(), {"role": "user", "content": [{"type": "text", "text": f"t{turn}"}]}]
    [one] = committed(site, "talk", 0.5)
    turns = [turn for turn in one.turns if turn.role == "assistant"]
    assert [one.token_ids[turn.start : turn.end].tolist() for turn in turns] == answered
    assert one.action_mask.sum() == sum(map(len, answered))
    assert one.reward == 0.5
    assert one.reward_parts == {"feedback": 0.5}


def test_edited_history_forks_and_shared_turns_count_once(site: Running) -> None:
    ask = partial(client(site, "fork").chat.completions.create, seed=2)  # none of these answers ends early
    first = ask(model="", messages=HI).choices[0].message
    after = [*HI, {"role": "assistant", "content": first.content}]
    ask(model="", messages=[*after, {"role": "user", "content": "a"}])
    ask(model="", messages=[*after, {"role": "user", "content": "b"}])
    ask(model="", messages=[*HI, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "c"}])
    experiences = committed(site, "fork")
    assert [int(one.action_mask.sum()) for one in experiences] == [32, 16, 16]
    assert len({one.episode for one in experiences}) == 1
    assert len({one.id for one in experiences}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_go_out_and_come_back_as_the_tokens_they_were(stream: bool) -> None:
    with running([f"Let me see.\n{CALL}", "It is 3."], max_new_tokens=120, max_position_embeddings=1024) as site:
        ask, messages = client(site, "tools").chat.completions.create, list(HI)
        if stream:
            chunks = [each.choices[0] for each in ask(model="", messages=messages, tools=TOOLS, stream=True)]
            content = "".join(each.delta.content or "" for each in chunks)
            calls: Any = [call for each in chunks for call in each.delta.tool_calls or []]
            reason = chunks[-1].finish_reason
        else:
            choice = ask(model="", messages=messages, tools=TOOLS, tool_choice="auto").choices[0]
            content, calls, reason = choice.message.content or "", choice.message.tool_calls, choice.finish_reason
        assert (content, reason) == ("Let me see.", "tool_calls")
        assert calls[0].function.name == "add"
        assert json.loads(calls[0].function.arguments) == {"a": 1, "b": [2, "x"]}
        own_way = json.dumps({"b": [2, "x"], "a": 1}, indent=2)  # as some frameworks write what they were sent
        call = {"id": "renamed", "type": "function", "function": {"name": "add", "arguments": own_way}}
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [call], "refusal": None, "name": "agent"},
            {"role": "tool", "tool_call_id": "renamed", "content": "3"},
        ]
        last = ask(model="", messages=messages, tools=TOOLS).choices[0]
        assert (last.message.content, last.finish_reason) == ("It is 3.", "stop")
        [one] = committed(site, "tools")
        text = site.service.chat.decode(one.token_ids.tolist())
        assert [turn.role for turn in one.turns] == ["prompt", "assistant", "observation", "assistant"]
        assert text.count(CALL) == 1
        assert "tool:\n3\n" in text  # as the template shows a result
        assert '"description": "Adds."' in text, "the template knows of no tools, so they are described"


def test_stop_strings_end_answers_and_never_show(site: Running) -> None:
    with running(says=["one two STOP three", "one two STOP three", "one two STO"], max_new_tokens=30) as said:
        ask = client(said).chat.completions.create
        whole = ask(model="", messages=HI, stop="STOP").choices[0]
        assert (whole.message.content, whole.finish_reason) == ("one two ", "stop")
        chunks = [
            each.choices[0].delta.content or "" for each in ask(model="", messages=HI, stop=["STOP"], stream=True)
        ]
        assert "".join(chunks) == "one two "
        chunks = [
            each.choices[0].delta.content or "" for each in ask(model="", messages=HI, stop=["STOP"], stream=True)
        ]
        assert "".join(chunks) == "one two STO"


def test_texts_are_completed_from_text_and_tokens(site: Running) -> None:
    ask = client(site, "texts").completions.create
    made = ask(model="", prompt=["how", "many"], n=2, max_tokens=3, echo=True, seed=5)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(made.choices, ["how", "how", "many", "many"], strict=True):
        assert choice.text.startswith(prompt)
        assert len(choice.text) > len(prompt)
    ids = site.service.chat.encode("how")
    same = [ask(model="", prompt=prompt, max_tokens=6, seed=5, logprobs=2).choices[0] for prompt in ("how", ids)]
    assert same[0].text == same[1].text
    assert same[0].logprobs is not None
    assert same[0].logprobs.token_logprobs is not None
    assert len(same[0].logprobs.token_logprobs) == 6
    streamed = "".join(each.choices[0].text for each in ask(model="", prompt=ids, max_tokens=6, seed=5, stream=True))
    assert streamed == same[0].text


def test_a_text_goes_on_from_the_tokens_that_were_cut_off(site: Running) -> None:
    ask = client(site, "longer").completions.create
    first = ask(model="", prompt="how", max_tokens=4, seed=1).choices[0].text
    ask(model="", prompt=f"how{first} apples", max_tokens=4, seed=2)
    [one] = committed(site, "longer")
    assert [turn.role for turn in one.turns] == ["prompt", "assistant", "observation", "assistant"]


def test_greedy_replies_are_not_learned_from_and_other_temperatures_are_noted(site: Running) -> None:
    ask = client(site, "sampling").chat.completions.create
    ask(model="", messages=HI, temperature=0)
    ask(model="", messages=[{"role": "user", "content": "warm"}], temperature=0.5, top_p=0.9)
    greedy, warm = committed(site, "sampling")
    assert (greedy.action_tokens, warm.action_tokens) == (0, 16)
    assert warm.temperature == 0.5


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": [{"role": "user"}]}, "invalid_messages", "has no content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_content", "text only"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad_text", "surrogate"),
        ({"messages": HI, "tools": [{"type": "function", "function": {"name": "a", "x": "\ud800"}}]}, "bad_text", ""),
        ({"messages": HI, "temperature": 1e-9}, "invalid_value", "greedy"),
        ({"messages": HI, "temperature": "hot"}, "invalid_request", "temperature"),
        ({"messages": HI, "n": 1000}, "invalid_request", "n: "),
        ({"messages": HI, "length_penalty": 0.5}, "unsupported_parameter", "neutral value"),
        ({"messages": HI, "frequency_penalty": 2.5}, "invalid_request", "frequency_penalty"),
        ({"messages": HI, "logit_bias": {"100000": 1.0}}, "invalid_value", "token ids below"),
        ({"messages": HI, "logit_bias": {"5": 101.0}}, "invalid_request", "logit_bias"),
        ({"messages": HI, "response_format": {"type": "xml"}}, "invalid_value", "json_schema"),
        ({"messages": HI, "response_format": {"type": "json_schema"}}, "invalid_value", "json_schema"),
        ({"messages": HI, "response_format": WRONG_SCHEMA}, "invalid_value", "not supported"),
        ({"messages": HI, "tool_choice": "required"}, "invalid_value", "of one of `tools`"),
        ({"messages": HI, "made_up": 1}, "unsupported_parameter", "`made_up` is not a field"),
        ({"messages": HI, "top_logprobs": 2}, "invalid_value", "needs `logprobs`"),
        ({"messages": HI, "stream_options": {"include_usage": True}}, "invalid_value", "needs `stream`"),
        ({"messages": HI, "tools": DEEP}, "invalid_value", "nested too deeply"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "context_length_exceeded", "context of 256 tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_what_to_do(
    site: Running, body: dict[str, Any], code: str, says: str
) -> None:
    content = json.dumps(body).encode()
    headers = HEADERS | {"content-type": "application/json"}
    answer = httpx.post(f"{site.base_url}/chat/completions", content=content, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert says in error["message"]
    assert site.service.gate.under_way == 0


def test_fields_that_change_nothing_are_ignored(site: Running) -> None:
    extra = {"service_tier": "auto", "parallel_tool_calls": True, "logit_bias": {}, "frequency_penalty": 0}
    made = client(site).chat.completions.create(
        model="", messages=HI, user="ann", metadata={"a": "b"}, presence_penalty=0, extra_body=extra
    )
    assert made.choices


def test_token_ids_that_do_not_exist_are_refused(site: Running) -> None:
    for prompt in ([10**6], [[1, 2], [-1]], [], ""):
        answer = post(site, "/v1/completions", {"prompt": prompt})
        assert answer.status_code == 400, answer.text
    assert post(site, "/v1/completions", {"prompt": "a", "max_tokens": 0}).status_code == 400
    assert post(site, "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}).status_code == 400


def test_keys_hosts_pages_and_sizes_are_checked(site: Running) -> None:
    url = f"{site.base_url}/chat/completions"
    body = {"messages": HI}
    with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
        client(site, api_key="sk-other").chat.completions.create(model="", messages=HI)
    assert httpx.post(url, json=body).headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{site.address}/metrics").status_code == 401
    assert httpx.get(f"{site.address}/health").status_code == 200
    assert httpx.post(url, json=body, headers=HEADERS | {"host": "evil.example"}).status_code == 403
    assert httpx.post(url, json=body, headers=HEADERS | {"sec-fetch-site": "cross-site"}).status_code == 403
    assert (
        httpx.post(url, content=json.dumps(body), headers=HEADERS | {"content-type": "text/plain"}).status_code == 400
    )
    with pytest.raises(openai.APIStatusError) as caught:
        client(site).chat.completions.create(model="", messages=[{"role": "user", "content": "x" * 9 * 2**20}])
    assert caught.value.status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(12):
            yield b" " * 2**20

    assert httpx.post(url, content=endless(), headers=HEADERS).status_code == 413
    deep = b'{"messages":' + b"[" * 100_000
    assert httpx.post(url, content=deep, headers=HEADERS | {"content-type": "application/json"}).status_code == 400
    assert httpx.get(f"{site.address}/nothing", headers=HEADERS).json()["error"]["code"] == "not_found"


def test_a_session_is_named_by_path_header_or_key(site: Running) -> None:
    by_path = openai.OpenAI(base_url=f"{site.address}/s/one/v1", api_key=KEY, max_retries=0)
    by_path.chat.completions.create(model="", messages=HI)
    post(site, "/v1/chat/completions", {"messages": HI}, **{"x-session-id": "one"})
    client(site, "one").chat.completions.create(model="", messages=HI)
    assert len(committed(site, "one")) == 3
    url = f"{site.address}/s/one/v1/chat/completions"
    both = httpx.post(url, json={"messages": HI}, headers=HEADERS | {"x-session-id": "two"})
    assert (both.status_code, both.json()["error"]["code"]) == (400, "invalid_session")
    assert post(site, "/v1/chat/completions", {"messages": HI}, **{"x-session-id": "a b"}).status_code == 400


def test_feedback_reaches_a_session_by_any_of_its_completions(site: Running) -> None:
    made = client(site).chat.completions.create(model="", messages=HI)
    assert post(site, "/feedback", {"completion": made.id, "reward": {"right": 1, "short": 0.25}}).json() == {
        "session": made.id,
        "reward": 1.25,
        "parts": {"right": 1.0, "short": 0.25},
        "committed": False,
    }
    assert post(site, "/feedback", {"completion": made.id, "reward": {"short": 0.5}}).json()["reward"] == 1.5
    assert post(site, "/commit", {"session": made.id}).json() == {"committed": [made.id], "experiences": 1}
    [one] = site.kept.finished[-1].experiences
    assert (one.reward, one.reward_parts) == (1.5, {"right": 1.0, "short": 0.5})
    assert post(site, "/commit", {"session": made.id}).status_code == 404
    assert post(site, "/feedback", {"completion": made.id, "reward": 1}).status_code == 404
    assert post(site, "/feedback", {"reward": 1}).status_code == 400
    nan = httpx.post(f"{site.address}/feedback", content='{"session": "a", "reward": NaN}', headers=HEADERS)
    assert nan.status_code == 400


def test_too_many_requests_are_told_to_come_back_and_the_client_does() -> None:
    with running(limits=ServiceLimits(requests=1)) as site:
        site.service.engine.pause()
        answers: list[Any] = []

        def ask() -> None:
            answers.append(client(site, max_retries=8).chat.completions.create(model="", messages=HI))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        while not site.service.gate.under_way:
            pass
        with pytest.raises(openai.RateLimitError) as caught:
            client(site).chat.completions.create(model="", messages=HI)
        assert caught.value.response.headers["retry-after"] == "1"
        threads[1].start()
        site.loop.call_soon_threadsafe(site.service.engine.resume)
        for each in threads:
            each.join()
        assert len(answers) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(stream: bool) -> None:
    with running(max_new_tokens=200) as site:
        site.service.engine.pause()
        body = {"messages": HI, "stream": stream}
        with closing(HTTPConnection(site.address.removeprefix("http://"))) as leaving:
            headers = HEADERS | {"content-type": "application/json"}
            leaving.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            wait_until(lambda: site.service.gate.under_way == 1)
        wait_until(lambda: not site.service.gate.under_way)
        wait_until(lambda: b"rollmill_aborted_total 1.0" in site.service.gauges.text())
        assert not site.service.engine.core.has_work  # type: ignore[attr-defined]


def test_a_deadline_ends_a_request() -> None:
    with running(limits=ServiceLimits(deadline_s=0.05)) as site:
        site.service.engine.pause()
        answer = post(site, "/v1/chat/completions", {"messages": HI})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        streamed = post(site, "/v1/chat/completions", {"messages": HI, "stream": True})
        assert streamed.status_code == 200
        assert "deadline_exceeded" in streamed.text
        assert "[DONE]" not in streamed.text


def test_sessions_are_bounded_and_what_is_dropped_is_counted() -> None:
    with running(limits=ServiceLimits(sessions=2)) as site:
        for name in "abc":
            client(site, name).chat.completions.create(model="", messages=HI)
        assert post(site, "/feedback", {"session": "a", "reward": 1}).status_code == 404
        assert b'sessions_dropped_total{why="number"} 1.0' in site.service.gauges.text()
        site.service.sessions._idle_s = -1.0
        assert post(site, "/feedback", {"session": "b", "reward": 1}).status_code == 404
        assert b'sessions_dropped_total{why="age"} 2.0' in site.service.gauges.text()


def test_refused_requests_hold_no_session_and_push_none_out() -> None:
    with running(limits=ServiceLimits(sessions=1)) as site:
        client(site, "a").chat.completions.create(model="", messages=HI)
        for headers in ({}, {"x-session-id": "b"}):
            long = {"messages": [{"role": "user", "content": "x" * 300}]}
            assert post(site, "/v1/chat/completions", long, **headers).status_code == 400
        assert len(site.service.sessions) == 1
        assert post(site, "/feedback", {"session": "b", "reward": 1}).status_code == 404
        assert post(site, "/feedback", {"session": "a", "reward": 1}).status_code == 200
        assert post(site, "/commit", {}).json()["committed"] == ["a"]


def test_sessions_are_bounded_by_their_tokens_together() -> None:
    with running(["as long as it may be"] * 3, limits=ServiceLimits(session_tokens=100)) as site:
        for name in "abc":
            client(site, name).chat.completions.create(model="", messages=HI)
        assert [name for _, name in site.service.sessions._held] == ["b", "c"]
        assert b'sessions_dropped_total{why="tokens"} 1.0' in site.service.gauges.text()


def test_a_full_session_that_nobody_can_commit_begins_anew() -> None:
    with running(sink=False) as site:
        ask = client(site, "a").chat.completions.create
        ask(model="", messages=HI)
        site.session("a")._most_tokens = 1
        assert ask(model="", messages=HI).choices
    with running() as site:
        ask = client(site, "a").chat.completions.create
        ask(model="", messages=HI)
        site.session("a")._most_tokens = 1
        with pytest.raises(openai.BadRequestError, match="commit it, and begin another"):
            ask(model="", messages=HI)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_repeats_itself_is_cut_off_and_costs(stream: bool) -> None:
    repetition = RepetitionConfig(tokens=2, times=2, period=1, penalty=0.25)
    with running(["aaaaaaaaaaaa"], max_new_tokens=30, repetition=repetition) as site:
        made: Any = client(site, "again").chat.completions.create(model="", messages=HI, stream=stream)
        last = list(made)[-1] if stream else made
        assert last.choices[0].finish_reason == "length"
        [one] = committed(site, "again")
        assert (one.reward, one.reward_parts) == (0.75, {"feedback": 1.0, "rollout/repetition": -0.25})


@pytest.mark.parametrize(
    "reward", [{"a": 1e308, "b": 1e308}, {"\ud800": 1}, {"x" * 200: 1}, {str(i): 1 for i in range(65)}, {}, True]
)
def test_rewards_that_no_run_could_use_are_refused(site: Running, reward: Any) -> None:
    client(site, "worth").chat.completions.create(model="", messages=HI)
    answer = httpx.post(
        f"{site.address}/feedback",
        content=json.dumps({"session": "worth", "reward": reward}).encode(),
        headers=HEADERS | {"content-type": "application/json"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.slow
def test_a_session_has_so_many_rewards(site: Running) -> None:
    client(site, "parts").chat.completions.create(model="", messages=HI)
    for number in range(64):
        assert post(site, "/feedback", {"session": "parts", "reward": {str(number): 1}}).status_code == 200
    assert "at most 64 parts" in post(site, "/feedback", {"session": "parts", "reward": 1}).json()["error"]["message"]
    assert post(site, "/feedback", {"session": "parts", "reward": {"0": 2}}).json()["reward"] == 65


def test_what_breaks_is_told_in_the_format_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as site:
        monkeypatch.setattr(site.service.sessions, "of", lambda caller: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="its log says why"):
            client(site, "a").chat.completions.create(model="", messages=HI)
        assert site.service.gate.under_way == 0


def test_without_a_place_for_sessions_feedback_is_refused() -> None:
    with running(sink=False, key=None) as site:
        made = openai.OpenAI(base_url=site.base_url, api_key="whatever").chat.completions.create(model="", messages=HI)
        assert made.choices
        assert httpx.post(f"{site.address}/feedback", json={"completion": made.id, "reward": 1}).status_code == 400
        assert httpx.post(f"{site.address}/commit", json={}).status_code == 400
        assert len(site.service.sessions) == 0


def test_a_server_that_ends_finishes_what_it_began() -> None:
    with running(max_new_tokens=100) as site:
        answers: list[Any] = []
        site.service.engine.pause()
        asking = threading.Thread(
            target=lambda: answers.append(client(site).chat.completions.create(model="", messages=HI))
        )
        asking.start()
        while not site.service.gate.under_way:
            pass
        site.service.gate.closing = True
        assert post(site, "/v1/chat/completions", {"messages": HI}).json()["error"]["code"] == "shutting_down"
        assert httpx.get(f"{site.address}/health").status_code == 503
        site.loop.call_soon_threadsafe(site.service.engine.resume)
        site.call(site.server.stop())
        asking.join()
        assert answers[0].choices[0].finish_reason in ("length", "stop")


def test_recorded_log_probs_are_those_of_the_answer(site: Running) -> None:
    made = client(site, "exact").chat.completions.create(
        model="", messages=HI, temperature=0.7, top_p=0.8, logprobs=True, top_logprobs=1
    )
    [one] = committed(site, "exact")
    assert made.choices[0].logprobs is not None
    told = [each.logprob for each in made.choices[0].logprobs.content or []]
    np.testing.assert_allclose(one.logprobs[one.action_mask], told, atol=1e-5)
