"""What agents are built with uses the endpoint unmodified: the OpenAI Agents SDK, and litellm."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
from support.endpoints import CLIENT, KEY, running

from rollmill.apps.serve.endpoint.service import ServiceLimits

if TYPE_CHECKING:
    from agents import Agent

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>'


def agent(base_url: str, chat: bool) -> Agent:
    """An agent with a tool, on chat completions, or on responses as the SDK makes it by default."""
    import agents  # here, since it takes long, and every process of pytest collects this file

    def multiply(a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key=f"{KEY}:framework", max_retries=0)
    model: Any = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client) if chat else None
    agents.set_default_openai_client(client, use_for_tracing=False)
    tools: Any = [agents.function_tool(multiply)]
    return agents.Agent(name="calculator", instructions="Use tools.", tools=tools, model=model)


@pytest.mark.parametrize("chat", [True, False])
def test_an_agent_with_a_tool_is_recorded_as_one_trajectory(chat: bool) -> None:
    says = [CALL, "It is 391.", "You are welcome."]
    with running(says, limits=ServiceLimits(), max_new_tokens=120, max_position_embeddings=2048) as site:

        async def use() -> list[str]:
            made = agent(site.base_url, chat)
            from agents import Runner

            first = await Runner.run(made, "What is 17 times 23?")
            again = [*first.to_input_list(), {"role": "user", "content": "Thanks."}]
            second = Runner.run_streamed(made, again)
            async for _ in second.stream_events():
                pass
            return [str(first.final_output), str(second.final_output)]

        assert asyncio.run(use()) == ["It is 391.", "You are welcome."]
        session = site.service.sessions.find(CLIENT, name="framework")
        session.rewarded(1.0)
        site.call(site.service.sessions.commit([session], site.kept, site.service.chat.decode))
        [one] = site.kept.finished[-1].experiences
        assert [turn.role for turn in one.turns] == [
            "prompt", "assistant", "observation", "assistant", "observation", "assistant",
        ]  # fmt: skip
        said = [one.token_ids[turn.start : turn.end].tolist() for turn in one.turns if turn.role == "assistant"]
        encode, end = site.service.chat.encode, site.service.chat.tokenizer.eos_token_id
        assert said == [[*encode(text), end] for text in says]
        assert one.action_tokens == sum(map(len, said))
        assert "391" in one.turns[2].text


@pytest.mark.slow  # it takes long to import
def test_litellm_uses_all_three_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    function: dict[str, Any] = {"name": "multiply", "parameters": {"type": "object", "properties": {}}}
    says = ["one", CALL, "two", CALL, "three"]
    with running(says, limits=ServiceLimits(), max_new_tokens=120, max_position_embeddings=2048) as site:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        for model, base in (("openai/policy", site.base_url), ("anthropic/policy", site.address)):
            options: Any = {"model": model, "api_base": base, "api_key": f"{KEY}:litellm", "max_tokens": 120}
            pieces = litellm.completion(messages=messages, stream=True, **options)
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            tools = [{"type": "function", "function": function}]
            made: Any = litellm.completion(messages=messages, tools=tools, **options)
            [call] = made.choices[0].message.tool_calls
            assert (text, call.function.name) == ("one" if "openai" in model else "two", "multiply")
        options = {"model": "openai/policy", "api_base": site.base_url, "api_key": f"{KEY}:litellm"}
        answer: Any = litellm.responses(input="hi", **options)
        assert answer.output[0].content[0].text == "three"
        assert len(site.session("litellm").recorder.calls) == len(says)
