"""/v1/messages as Anthropic's own client sees it, against a real server over a toy model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.endpoints import KEY, Running, running

from rollmill.types import Experience

if TYPE_CHECKING:
    import anthropic

HI: list[Any] = [{"role": "user", "content": "hi"}]
HEADERS = {"x-api-key": KEY}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Adds.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
]
BLOCK: dict[str, Any] = {"type": "text", "text": "hi"}


@pytest.fixture(scope="module")
def site() -> Iterator[Running]:
    with running(max_position_embeddings=1024) as made:
        yield made


def client(site: Running, session: str | None = None, **options: Any) -> anthropic.Anthropic:
    import anthropic  # here, since it takes long, and every process of pytest collects this file

    key = KEY if session is None else f"{KEY}:{session}"
    return anthropic.Anthropic(**{"base_url": site.address, "api_key": key, "max_retries": 0} | options)


def post(site: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(site.address + path, json=body, headers=HEADERS)


def committed(site: Running, session: str) -> list[Experience]:
    """The experiences of a session, which is over."""
    answer = post(site, "/feedback", {"session": session, "reward": 1.0, "commit": True})
    assert answer.status_code == 200, answer.text
    return site.kept.finished[-1].experiences


def test_a_conversation_is_one_experience(site: Running) -> None:
    made, messages, used = client(site, "talk"), list(HI), 0
    for turn in range(3):
        answer = made.messages.create(
            model="any", max_tokens=8, system="Be kind.", messages=messages, extra_body={"temperature": 0.7}
        )
        assert (answer.stop_reason, answer.model, answer.role) == ("max_tokens", "toy", "assistant")
        used += answer.usage.output_tokens
        said: Any = answer.content if turn % 2 else answer.content[0].model_dump()["text"]
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [{"type": "text", "text": f"t{turn}", "cache_control": {"type": "ephemeral"}}]},
        ]
    [one] = committed(site, "talk")
    assert one.action_tokens == used == 24
    assert [turn.role for turn in one.turns].count("assistant") == 3
    assert "Be kind." in one.turns[0].text
    assert one.info["client"] == "default"


def test_the_answer_is_that_of_a_chat(site: Running) -> None:
    body = {"messages": HI, "seed": 5, "max_tokens": 12}
    chat = post(site, "/v1/chat/completions", body).json()
    options: Any = {"extra_body": {"seed": 5}}
    made = client(site).messages.create(model="", max_tokens=12, messages=HI, **options)
    assert [block.model_dump()["text"] for block in made.content] == [chat["choices"][0]["message"]["content"]]
    assert made.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert client(site).messages.count_tokens(model="", messages=HI).input_tokens == made.usage.input_tokens
    system = client(site).messages.count_tokens(model="", messages=HI, system=[{"type": "text", "text": "x"}])
    assert system.input_tokens > made.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered_in_one_trajectory(stream: bool) -> None:
    says = [f"Let me see.\n{CALL}", f"{CALL}\n{CALL}", "It is 3."]
    with running(says, max_new_tokens=250, max_position_embeddings=2048) as site:
        messages, found = list(HI), []
        for _ in says:
            options: Any = {"model": "", "max_tokens": 250, "messages": messages, "tools": TOOLS}
            if stream:
                with client(site, "tools").messages.stream(**options) as events:
                    pieces = "".join(events.text_stream)
                    answer = events.get_final_message()
                assert pieces == "".join(block.text for block in answer.content if block.type == "text")
            else:
                answer = client(site, "tools").messages.create(**options, tool_choice={"type": "auto"})
            found.append([(block.type, getattr(block, "input", None)) for block in answer.content])
            uses = [block for block in answer.content if block.type == "tool_use"]
            assert answer.stop_reason == ("tool_use" if uses else "end_turn")
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": f"result {i}"}]}
                for i, use in enumerate(uses)
            ]
            messages += [
                {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
                {"role": "user", "content": [*results, BLOCK]},
            ]
        call = ("tool_use", {"a": 1, "b": [2, "x"]})
        assert found == [[("text", None), call], [call, call], [("text", None)]]
        [one] = committed(site, "tools")
        encode, end = site.service.chat.encode, site.service.chat.tokenizer.eos_token_id
        said = [one.token_ids[turn.start : turn.end].tolist() for turn in one.turns if turn.role == "assistant"]
        assert said == [[*encode(text), end] for text in says]
        texts = [turn.text for turn in one.turns if turn.role == "observation"]
        assert [text.count("result") for text in texts] == [1, 2]


def test_a_stream_has_the_events_of_the_protocol() -> None:
    with running([f"Ok. {CALL}"], max_new_tokens=120, max_position_embeddings=1024) as site:
        events = client(site).messages.create(model="", max_tokens=120, messages=HI, tools=TOOLS, stream=True)
        found = [event.type for event in events]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert list(dict.fromkeys(found[:-2])) == ["message_start", *block]
        assert found[-5:] == [*block, "message_delta", "message_stop"]
        assert found.count("content_block_stop") == 2


def test_the_clients_own_loop_over_tools_runs() -> None:
    """It asks for threads first, which the server would hold, and goes on without."""
    import anthropic

    @anthropic.beta_tool
    def add(a: int, b: list[Any]) -> str:
        """Adds."""
        return f"{a} and {len(b)}"

    with running([f"Ok. {CALL}", "It is 3."], max_new_tokens=250, max_position_embeddings=2048) as site:
        runner = client(site, "loop").beta.messages.tool_runner(model="", max_tokens=250, tools=[add], messages=HI)
        assert [block.text for block in runner.until_done().content if block.type == "text"] == ["It is 3."]
        [one] = committed(site, "loop")
        assert "1 and 2" in one.turns[2].text


def test_stop_sequences_are_named() -> None:
    with running(["one two three", "one"], max_new_tokens=60) as site:
        for expected in (("stop_sequence", " two", "one"), ("end_turn", None, "one")):
            made = client(site).messages.create(
                model="", max_tokens=60, messages=HI, stop_sequences=["three", " two", "never"]
            )
            assert (made.stop_reason, made.stop_sequence, made.content[0].model_dump()["text"]) == expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"n": 2}, "`n`"),
        ({"top_p": 3}, "top_p"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, *HI]}, "needs `name`"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "server tool"),
        ({"mcp_servers": [{"type": "url"}]}, "`mcp_servers`"),
    ],
)
def test_what_is_not_supported_is_refused_in_the_protocols_format(site: Running, change: Any, says: str) -> None:
    answer = post(site, "/v1/messages", {"model": "", "messages": HI, "max_tokens": 4} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert says in answer.json()["error"]["message"]


def test_the_client_raises_its_own_errors(site: Running) -> None:
    import anthropic

    with pytest.raises(anthropic.AuthenticationError, match="API key is wrong") as found:
        client(site, api_key="sk-wrong").messages.create(model="", max_tokens=4, messages=HI)
    assert found.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="leaves no room"):
        client(site).messages.create(model="", max_tokens=4, messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(anthropic.BadRequestError, match="last message"):
        client(site).messages.create(
            model="", max_tokens=4, messages=[{"role": "assistant", "content": "I"}], stream=True
        )


def test_hints_on_thinking_change_nothing(site: Running) -> None:
    ask = {"messages": HI, "seed": 3, "max_tokens": 8}
    plain = post(site, "/v1/messages", ask).json()["content"]
    hints = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "metadata": {"user_id": "ann"}}
    hinted = post(site, "/v1/messages", ask | hints)
    assert hinted.json()["content"] == plain
