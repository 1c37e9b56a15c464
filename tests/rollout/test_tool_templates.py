"""Tools through real chat templates: what is shown, and that going on from a call keeps the policy's own tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from bench.chat_templates.corpus import template, templates
from bench.chat_templates.tokenizers import stand_in
from rollmill.config.rollout import SamplingConfig
from rollmill.data.renderer.call_formats import render_tool_calls, tool_result_message
from rollmill.engines.base import GenerationRequest
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.policy import Policy
from rollmill.rollout.recorder import Recorder
from rollmill.types import Completion, StopReason, ToolCall

NAMES = [
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2", "gemma", "gemma3", "phi3",
]  # fmt: skip
OTHERS = ["glm4moe", "deepseekv3", "cohere2"]
"""Their turns end with more than one token, or drop thoughts: going on forks there."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
CALL = ToolCall("abcdefghi", "calculator", {"expression": "17*23"})


def chat_format(name: str) -> ChatRenderer:
    """A small tokenizer with the real template of a model, its marks, and the tokens that end its turns."""
    if name not in {each.name for each in templates()}:
        pytest.skip("trl, whose package holds real chat templates, is not installed, or has no such template")
    tokenizer, ends = stand_in(template(name))
    return ChatRenderer(tokenizer, ends)


class Scripted:
    """An engine that says what it is told to."""

    version = 0

    def __init__(self, chat: ChatRenderer, texts: list[str]) -> None:
        self._chat, self._texts = chat, list(texts)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        ids = [*self._chat.encode(self._texts.pop(0)), self._chat.renderer().turn_end_id]
        zeros = np.zeros(len(ids), np.float32)
        text = self._chat.tokenizer.decode(ids, skip_special_tokens=True)
        prompt, tokens = np.array(request.prompt_ids, np.int32), np.array(ids, np.int32)
        return [Completion(prompt, tokens, zeros, tokens * 0, zeros, text, StopReason.EOS, 0, 0)]


def policy_saying(chat: ChatRenderer, *texts: str) -> tuple[Policy, Recorder]:
    engine: Any = Scripted(chat, list(texts))
    recorder = Recorder()
    return Policy(engine, chat, SamplingConfig(), seed=0, name="a test", recorder=recorder), recorder


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_shown_and_results_come_back_without_forking(name: str) -> None:
    chat = chat_format(name)
    written = 'Let me see.\n<tool_call>\n{"name":  "calculator", "arguments": {"expression": "17*23"}}\n</tool_call>'
    if name in ("llama3_1", "llama3_2"):  # their own format
        written = '{"name": "calculator", "parameters":  {"expression": "17*23"}}'
    policy, recorder = policy_saying(chat, written, "It is 391.")

    async def solve() -> None:
        messages: list[Any] = [{"role": "user", "content": "What is 17*23?"}]
        first = await policy.chat(messages, tools=TOOLS)
        [call] = first.tool_calls
        assert (call.name, call.arguments) == ("calculator", {"expression": "17*23"})
        assert first.message["content"] == ("Let me see." if written.startswith("Let") else None)
        messages += [first.message, tool_result_message(call, "result 391")]
        assert (await policy.chat(messages, tools=TOOLS)).tool_calls == []

    asyncio.run(solve())
    [experience] = recorder.experiences(id="a", task_id="t", group="g", decode=chat.decode)
    text = chat.decode(experience.token_ids.tolist())
    assert "calculator" in experience.prompt
    assert "17*23?" in experience.prompt
    assert written in text  # with its two spaces: no template has written it anew
    assert "result 391" in text
    said = chat.decode(experience.token_ids[experience.action_mask].tolist())
    said = said.replace(chat.renderer().template.turn_end, "")
    assert said == f"{written}It is 391."


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_calls_of_a_history_that_the_policy_did_not_write_are_shown(name: str) -> None:
    chat = chat_format(name)
    question = {"role": "user", "content": "What is 17*23?"}
    said = {"role": "assistant", "content": None, "tool_calls": [CALL.message()]}
    text = chat.prompt([question, said, tool_result_message(CALL, "result 391")], tools=TOOLS).text
    assert "17*23" in text.split("What is 17*23?")[1]
    assert "result 391" in text


def test_what_a_template_knows_is_found_out() -> None:
    known = {name: chat_format(name).renderer().template for name in ("qwen2_5", "gemma", "llama3")}
    assert (known["qwen2_5"].supports_tools, known["gemma"].supports_tools, known["llama3"].supports_tools) == (1, 0, 0)
    assert (known["qwen2_5"].supports_tool_results, known["gemma"].supports_tool_results) == (True, False)
    assert (known["qwen2_5"].supports_system, known["gemma"].supports_system) == (True, False)


def test_results_within_a_user_s_turn_are_joined() -> None:
    chat = chat_format("gemma")
    said = {"role": "assistant", "content": render_tool_calls([CALL, CALL])}
    asked = {"role": "user", "content": "Go on."}
    results = [tool_result_message(CALL, "391"), tool_result_message(CALL, "392")]
    text = chat.prompt([{"role": "user", "content": "What?"}, said, *results, asked], tools=TOOLS).text
    joined = "<tool_response>\n391\n</tool_response>\n<tool_response>\n392\n</tool_response>\nGo on."
    assert joined in text
    assert text.count("<start_of_turn>user") == 2
