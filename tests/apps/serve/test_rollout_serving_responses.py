"""/v1/responses as OpenAI's own client sees it, against a real server over a toy model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.endpoints import BOTH, KEY, OTHER_KEY, Running, running

from rollmill.apps.serve.endpoint import session
from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.types import Experience

HEADERS = {"authorization": f"Bearer {KEY}"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
]
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def site() -> Iterator[Running]:
    with running(keys=BOTH, max_position_embeddings=1024) as made:
        yield made


def client(site: Running, session: str | None = None, key: str = KEY) -> openai.OpenAI:
    named = key if session is None else f"{key}:{session}"
    return openai.OpenAI(base_url=site.base_url, api_key=named, max_retries=0)


def post(site: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(site.address + path, json=body, headers=HEADERS | headers)


def committed(site: Running, **of: str) -> list[Experience]:
    """The experiences of a session, which is over."""
    answer = post(site, "/feedback", {**of, "reward": 1.0, "commit": True})
    assert answer.status_code == 200, answer.text
    return site.kept.finished[-1].experiences


def test_the_answer_is_that_of_a_chat(site: Running) -> None:
    body = {"messages": [{"role": "system", "content": "be kind"}, *HI], "seed": 5, "max_tokens": 12}
    chat = post(site, "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2}).json()
    extra: Any = {"seed": 5}
    made = client(site).responses.create(
        model="any", input="hi", instructions="be kind", max_output_tokens=12, extra_body=extra, top_logprobs=2,
        reasoning={"effort": "low"}, text={"verbosity": "low"},
    )  # fmt: skip
    assert made.output_text == chat["choices"][0]["message"]["content"]
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 12)
    assert (made.status, made.incomplete_details) == ("incomplete", made.incomplete_details)
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    logprobs = made.to_dict()["output"][0]["content"][0]["logprobs"]  # type: ignore[index,call-overload]
    assert logprobs == chat["choices"][0]["logprobs"]["content"]
    parts = [{"role": "user", "type": "message", "content": [{"type": "input_text", "text": "hi"}]}]
    items = client(site).responses.create(model="", input=parts, instructions="be kind", extra_body=extra)  # type: ignore[call-overload]
    assert items.output_text.startswith(made.output_text)


def test_a_chain_of_responses_is_one_session_and_one_trajectory(site: Running) -> None:
    ask, previous, used = client(site).responses.create, None, 0
    for turn in range(3):
        made = ask(model="", input=f"turn {turn}", previous_response_id=previous, max_output_tokens=8)
        assert made.previous_response_id == previous
        assert made.usage is not None
        previous, used = made.id, used + made.usage.output_tokens
    [one] = committed(site, completion=str(previous))
    assert one.action_tokens == used
    assert [turn.role for turn in one.turns].count("assistant") == 3
    with pytest.raises(openai.NotFoundError, match="committed or dropped"):
        ask(model="", input="more", previous_response_id=previous)


def test_a_response_may_be_continued_twice(site: Running) -> None:
    ask = client(site, "fork").responses.create
    first = ask(model="", input="hi", max_output_tokens=8)
    for text in "ab":
        ask(model="", input=text, previous_response_id=first.id, max_output_tokens=8)
    assert [one.action_tokens for one in committed(site, session="fork")] == [16, 8]


def test_responses_are_those_of_a_client_and_a_session_and_only_if_stored(site: Running) -> None:
    made = client(site, "mine").responses.create(model="", input="hi")
    kept_out = client(site, "mine").responses.create(model="", input="hi", store=False)
    for asking, previous in (
        (client(site, key=OTHER_KEY), made.id),
        (client(site, "another"), made.id),
        (client(site, "mine"), kept_out.id),
        (client(site), "resp-unknown"),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            asking.responses.create(model="", input="more", previous_response_id=previous)


def test_without_recording_responses_are_held_within_the_limits() -> None:
    with running(sink=False, max_new_tokens=4, limits=ServiceLimits(sessions=2)) as site:
        ask = client(site).responses.create
        first = ask(model="", input="hi")
        ask(model="", input="more", previous_response_id=first.id)
        for _ in range(2):
            ask(model="", input="another")
        assert len(site.service.sessions) == 2
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            ask(model="", input="more", previous_response_id=first.id)
        ask(model="", input="hi", store=False)
        assert len(site.service.sessions) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_read_again_and_deleted(site: Running, stream: bool) -> None:
    api = client(site, f"again-{stream}").responses
    options: Any = {"model": "", "input": "hi", "max_output_tokens": 8, "tools": TOOLS, "metadata": {"k": "v"}}
    made: Any = api.create(**options, top_logprobs=1, stream=stream)
    made = list(made)[-1].response if stream else made
    again = api.retrieve(made.id)
    assert (again.output_text, again.usage, again.status) == (made.output_text, made.usage, made.status)
    assert again.to_dict() | {"output": []} == made.to_dict() | {"output": []}
    assert again.to_dict()["output"][0]["content"][0]["logprobs"] == []  # type: ignore[index,call-overload]
    assert made.output[0].content[0].logprobs
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client(site, key=OTHER_KEY).responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        list(api.retrieve(made.id, stream=True))
    api.delete(made.id)
    for gone in (api.retrieve, api.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            gone(made.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        api.create(model="", input="more", previous_response_id=made.id)
    [one] = committed(site, session=f"again-{stream}")  # deleting does not take back what was recorded
    assert one.action_tokens == 8


def test_a_session_holds_its_newest_responses(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    api, made = client(site, "many").responses, []
    monkeypatch.setattr(session, "MOST_RESPONSES", 3)
    for number in range(5):
        previous = made[-1].id if made else None
        made.append(api.create(model="", input=str(number), max_output_tokens=2, previous_response_id=previous))
    assert [api.retrieve(each.id).id for each in made[2:]] == [each.id for each in made[2:]]
    for each in made[:2]:
        with pytest.raises(openai.NotFoundError):
            api.retrieve(each.id)
    monkeypatch.setattr(session, "MOST_RESPONSE_BYTES", 5000)
    long = [api.create(model="", input="a", max_output_tokens=2, instructions="b" * 500) for _ in range(2)]
    large = api.create(model="", input="a", max_output_tokens=2, metadata={"k": "v" * 6000})
    assert api.retrieve(large.id).metadata == {"k": "v" * 6000}
    with pytest.raises(openai.NotFoundError):
        api.retrieve(long[0].id)


@pytest.mark.parametrize(("held", "stream"), [(False, True), (True, False)])
def test_functions_are_called_and_answered_in_one_trajectory(held: bool, stream: bool) -> None:
    """With the conversation held by the server, or by the client."""
    says = [f"Let me see.\n{CALL}", f"{CALL}\n{CALL}", "It is 3."]
    with running(says, max_new_tokens=250, max_position_embeddings=2048) as site:
        items, previous, found = list[Any](HI), None, []
        for _ in says:
            options: Any = {"model": "", "input": items, "tools": TOOLS, "previous_response_id": previous}
            if stream:
                with client(site, "tools").responses.stream(**options) as events:
                    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                    made: Any = events.get_final_response()
                assert text == made.output_text
            else:
                made = client(site, "tools").responses.create(**options)
            assert made.status == "completed"
            found.append([item.type for item in made.output])
            calls = [item for item in made.output if item.type == "function_call"]
            assert {call.arguments for call in calls} <= {'{"a": 1, "b": [2, "x"]}'}
            outputs = [
                {"type": "function_call_output", "call_id": call.call_id, "output": f"result {i}"}
                for i, call in enumerate(calls)
            ]
            if held:
                items, previous = outputs, made.id
            else:
                items = [*items, *(item.to_dict() for item in made.output), *outputs]
        assert found == [["message", "function_call"], ["function_call", "function_call"], ["message"]]
        [one] = committed(site, session="tools")
        encode, end = site.service.chat.encode, site.service.chat.tokenizer.eos_token_id
        said = [one.token_ids[turn.start : turn.end].tolist() for turn in one.turns if turn.role == "assistant"]
        assert said == [[*encode(text), end] for text in says]
        texts = [turn.text for turn in one.turns if turn.role == "observation"]
        assert [text.count("result") for text in texts] == [1, 2]


def test_a_stream_has_the_events_of_the_interface(site: Running) -> None:
    options: Any = {"model": "", "input": "hi", "extra_body": {"seed": 3}, "top_logprobs": 1}
    events = list(client(site).responses.create(**options, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = client(site).responses.create(**options)
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(text) > 3
    assert "".join(text) == whole.output_text
    last: Any = events[-1]
    assert last.response.output[0].content[0].to_dict() == whole.output[0].content[0].to_dict()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": []}, "`input` is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "needs `call_id`"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"tools": [{"type": "web_search"}]}, "not a function"),
        ({"background": True}, "`background`"),
        ({"truncation": "auto"}, "`truncation`"),
        ({"n": 2}, "`n`"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_is_not_supported_is_refused(site: Running, change: Any, says: str) -> None:
    answer = post(site, "/v1/responses", {"model": "", "input": "hi"} | change)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
