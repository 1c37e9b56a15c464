"""Prompts and demonstrations as tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toys import toy_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from rollmill.data import demonstration_experience, encode_demonstration, encode_prompt, preference_pair, render_prompt
from rollmill.errors import TasksetError
from rollmill.types import ExperienceSource, Message, Task

CHAT = [Message(role="system", content="Be brief."), Message(role="user", content="How many?")]


def with_bos_and_eos() -> PreTrainedTokenizerFast:
    """A tokenizer that puts <bos> before and <eos> after every text, and whose chat template writes <bos> itself."""
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    ends = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=ends)
    tokenizer.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    return tokenizer


@given(st.text())
def test_plain_text_is_encoded_as_it_is(text: str) -> None:
    tokenizer = TOKENIZER
    task = Task("t:0", text)
    assert render_prompt(task, tokenizer) == text
    assert tokenizer.decode(encode_prompt(task, tokenizer)) == text


TOKENIZER = toy_tokenizer()


def test_a_chat_is_encoded_as_transformers_does() -> None:
    for tokenizer in (TOKENIZER, with_bos_and_eos()):
        task = Task("t:0", CHAT)
        expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert encode_prompt(task, tokenizer) == expected
    assert render_prompt(Task("t:0", CHAT), TOKENIZER) == "system:\nBe brief.\n\nuser:\nHow many?\n\nassistant:\n"


def test_the_tokenizers_own_special_tokens_come_once_and_a_prompt_stays_open() -> None:
    tokenizer = with_bos_and_eos()
    assert tokenizer.encode("x")[-1] == tokenizer.eos_token_id
    for prompt in ("How many?", CHAT):
        ids = encode_prompt(Task("t:0", prompt), tokenizer)
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in ids[1:]
        assert tokenizer.eos_token_id not in ids


def test_an_end_token_that_the_prompt_itself_writes_is_kept() -> None:
    ids = encode_prompt(Task("t:0", "one<eos>"), with_bos_and_eos())
    assert ids.count(TOKENIZER.eos_token_id) == 2


def test_a_chat_without_chat_template_is_an_error() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TasksetError, match="task t:7 is a chat: the model's tokenizer has no chat template"):
        encode_prompt(Task("t:7", CHAT), tokenizer)


def test_a_template_that_refuses_a_role_is_an_error_with_its_words() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(TasksetError, match=r"task t:7 .* refuses the messages: System role not supported"):
        encode_prompt(Task("t:7", CHAT), tokenizer)


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_demonstration_is_the_rollouts_prompt_then_the_response_then_the_end(prompt: str, response: str) -> None:
    task = Task("t:0", prompt, response=response)
    ids, mask = encode_demonstration(task, TOKENIZER, 1)
    n_prompt = mask.index(True)
    assert all(mask[n_prompt:])
    assert ids[:n_prompt] == encode_prompt(task, TOKENIZER)
    assert TOKENIZER.decode(ids[n_prompt:-1]) == response
    assert ids[-1] == 1


def test_a_task_without_response_cannot_be_imitated() -> None:
    with pytest.raises(TasksetError, match="task t:3 has no worked solution to imitate; name its column"):
        demonstration_experience(Task("t:3", "x"), TOKENIZER, 1)


@pytest.mark.parametrize("prompt", ["How many?", CHAT])
def test_an_expert_experience_learns_response_and_end_only(prompt: str | list[Message]) -> None:
    task = Task("t:3", prompt, response="twelve")
    experience = demonstration_experience(task, TOKENIZER, 1)
    n_prompt = len(encode_prompt(task, TOKENIZER))
    learned = experience.token_ids[experience.action_mask].tolist()
    assert learned == [*TOKENIZER.encode("twelve"), 1]
    assert not experience.action_mask[:n_prompt].any()
    assert (experience.source, experience.reward, experience.group) == (ExperienceSource.EXPERT, None, "t:3")
    assert (experience.logprobs == 0).all()
    assert (experience.versions == -1).all()
    assert {len(experience.logprobs), len(experience.versions), len(experience.action_mask)} == {
        len(learned) + n_prompt
    }
    assert [(turn.start, turn.end) for turn in experience.turns] == [(0, n_prompt), (n_prompt, n_prompt + len(learned))]


@pytest.mark.parametrize("prompt", ["How many?", CHAT])
def test_a_preference_pair_is_a_group_of_two_with_one_prompt(prompt: str | list[Message]) -> None:
    task = Task("t:3", prompt, response="twelve", rejected="ten or so")
    chosen, rejected = preference_pair(task, TOKENIZER, 1, "t:3/0")
    n_prompt = len(encode_prompt(task, TOKENIZER))
    for experience, text, reward in ((chosen, "twelve", 1.0), (rejected, "ten or so", 0.0)):
        assert (experience.source, experience.reward, experience.group) == (
            ExperienceSource.PREFERENCE,
            reward,
            "t:3/0",
        )
        assert experience.token_ids[:n_prompt].tolist() == encode_prompt(task, TOKENIZER)
        assert experience.token_ids[experience.action_mask].tolist() == [*TOKENIZER.encode(text), 1]
        assert (experience.response, experience.task_id) == (text, "t:3")
        assert (experience.versions == -1).all()
    assert [chosen.id, rejected.id] == ["t:3/0/chosen", "t:3/0/rejected"]
