"""Conversations go on from the policy's own tokens, or fork; over chat templates as models have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import NAMES, templated
from support.toys import toy_tokenizer

from rollmill.errors import EngineError
from rollmill.rollout.chat import ChatRenderer, RecordedReply
from rollmill.types import Completion, StopReason

KEEPING = ("chatml", "rollmill", "mistral", "qwen2_5", "llama3", "llama3_1", "gemma", "gemma3", "phi3", "cohere")
"""Templates that show what came before as it was, apart from white space around a turn."""


def completion(prompt: list[int], tokens: list[int]) -> Completion:
    n = len(tokens)
    zeros = np.zeros(n, np.float32)
    arrays = {"prompt_ids": np.array(prompt, np.int32), "token_ids": np.array(tokens, np.int32)}
    rest = {"logprobs": zeros - 1, "versions": np.zeros(n, np.int32), "kept_logmass": zeros}
    return Completion(**arrays, **rest, text="", stop_reason=StopReason.EOS, seed=0, index=0)


class Talk:
    """A conversation in which the policy's tokens are made up."""

    def __init__(self, name: str) -> None:
        self.tokenizer, ends = templated(name)
        self.chat = ChatRenderer(self.tokenizer, ends)
        self.end = next(iter(ends))
        self.messages: list[dict[str, Any]] = []
        self.said: list[RecordedReply] = []

    def turn(self, content: str, tokens: list[int], ended: bool) -> tuple[Any, RecordedReply]:
        """The user says something, the policy answers with `tokens`; the prompt and what was said."""
        self.messages.append({"role": "user", "content": content})
        prompt = self.chat.prompt(self.messages, self.said)
        produced = [*tokens, self.end] if ended else tokens
        made = completion(prompt.token_ids, produced)
        made.text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reply = self.chat.parse(prompt, made)
        self.messages.append(reply.message)
        said = self.chat.record_reply(self.messages, prompt, None, made, reply)
        self.said.append(said)
        return prompt, said


WORDS = st.text(st.sampled_from("ab 1\n<>é🙂"), min_size=1, max_size=12)
TURNS = st.lists(
    st.tuples(WORDS, st.lists(st.integers(3, 290), min_size=1, max_size=8), st.booleans()), min_size=2, max_size=4
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(turns=TURNS)
def test_a_prompt_begins_with_the_policy_s_own_tokens_or_is_the_template_s_text(
    name: str, turns: list[tuple[str, list[int], bool]]
) -> None:
    talk = Talk(name)
    for content, tokens, ended in turns:
        prompt, said = talk.turn(content, tokens, ended)
        before = prompt.continues
        if before is None:
            assert prompt.token_ids == talk.chat.encode(prompt.text)
        else:
            earlier = (*before.prompt_ids, *before.token_ids)
            assert tuple(prompt.token_ids[: len(earlier)]) == earlier
            added = talk.chat.decode(prompt.token_ids[len(earlier) :])
            assert prompt.text.endswith(added)  # separators behind the turn's end are there
            kept = prompt.text[: len(prompt.text) - len(added)]
            answer = (before.messages[-1]["content"] or "").strip()
            assert kept.removesuffix(talk.chat.decode([talk.end])).rstrip().endswith(answer)
        assert said.prompt_ids == tuple(prompt.token_ids)


@pytest.mark.parametrize("name", KEEPING)
def test_templates_that_keep_what_came_before_are_never_rendered_anew(name: str) -> None:
    talk = Talk(name)
    for number, tokens in enumerate(([40, 41, 42], [77, 78], [90, 30, 90])):
        prompt, _ = talk.turn(f"question {number}", tokens, ended=True)
        assert (prompt.continues is None) == (number == 0)
        assert prompt.text == talk.chat.renderer().text(talk.messages[:-1])


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1_distill"])
def test_a_template_that_drops_earlier_reasoning_forks(name: str) -> None:
    talk = Talk(name)
    thought = talk.tokenizer.encode("<think>\nhm\n</think>\n\n12", add_special_tokens=False)
    talk.turn("how many?", thought, ended=True)
    prompt, _ = talk.turn("and now?", thought, ended=True)
    assert prompt.continues is None
    assert "hm" not in prompt.text


def test_a_changed_history_is_another_branch() -> None:
    talk = Talk("chatml")
    talk.turn("a", [40, 41], ended=True)
    talk.messages[1] = {"role": "assistant", "content": "something else"}
    talk.messages.append({"role": "user", "content": "b"})
    assert talk.chat.prompt(talk.messages, talk.said).continues is None


def test_the_longest_known_conversation_goes_on() -> None:
    talk = Talk("chatml")
    talk.turn("a", [40, 41], ended=True)
    _, second = talk.turn("b", [50], ended=True)
    talk.messages.append({"role": "user", "content": "c"})
    assert talk.chat.prompt(talk.messages, talk.said).continues is second
    edited = [*talk.messages[:2], {"role": "user", "content": "other"}]
    assert talk.chat.prompt(edited, talk.said).continues is talk.said[0]


def test_other_tools_are_another_prompt() -> None:
    talk = Talk("qwen2_5")
    talk.turn("a", [40, 41], ended=True)
    talk.messages.append({"role": "user", "content": "b"})
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert talk.chat.prompt(talk.messages, talk.said, tools).continues is None


def test_without_a_template_the_error_says_what_to_do() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(EngineError, match=r"task 7: .*no chat template; use .* or `policy.complete`"):
        ChatRenderer(tokenizer, frozenset()).prompt([{"role": "user", "content": "a"}], name="task 7")


def test_what_a_template_refuses_is_told() -> None:
    tokenizer, ends = templated("gemma")
    with pytest.raises(EngineError, match="refuses the messages: System role not supported"):
        ChatRenderer(tokenizer, ends).prompt([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
