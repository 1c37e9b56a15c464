"""Demonstrations are what real chat templates continue a rollout's prompt with; texts are joined exactly."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bench.chat_templates.corpus import template, templates
from bench.chat_templates.tokenizers import stand_in
from rollmill.config.taskset import TasksetConfig
from rollmill.data import (
    demonstration_experience,
    encode_demonstration,
    encode_prompt,
    labelled_experience,
    load_taskset,
    preference_pair,
)
from rollmill.data.chat_check import check_chats
from rollmill.data.encoding import encode_answer
from rollmill.data.renderer import load_renderer
from rollmill.errors import TasksetError
from rollmill.models.run_tokenizer import load_run_tokenizer, save_run_tokenizer, use_run_date
from rollmill.types import Experience, Message, StopReason, Task

HI, FIVE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is 5."}
ASKED = {"role": "user", "content": "And now?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "rain"}


def tokenizer_of(name: str) -> Any:
    if name not in {each.name for each in templates()}:
        pytest.skip("trl, whose package holds real chat templates, is not installed, or has no such template")
    tokenizer, ends = stand_in(template(name))
    tokenizer.stop_ids = ends
    return tokenizer


def task_of(folder: Path, row: dict[str, Any], **keys: Any) -> Task:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [task] = load_taskset(TasksetConfig(path=folder / "rows.jsonl", **keys)).tasks
    return task


def learned(experience: Experience, tokenizer: Any) -> str:
    return str(tokenizer.decode(experience.token_ids[experience.action_mask].tolist()))


ENDS = [
    ("gemma3", "It is 5.<end_of_turn>"),
    ("phi3_5", "It is 5.<|end|>"),
    ("qwen2_5", "It is 5.<|im_end|>"),
    ("llama3", "It is 5.<|eot_id|>"),
    ("llama3_1", "It is 5.<|eot_id|>"),
    ("glm4moe", "\n<think></think>\nIt is 5.<|user|>"),
    ("gptoss", "<|channel|>final<|message|>It is 5.<|return|>"),
    ("cohere2", "It is 5.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    ("qwen3", "<think>\n\n</think>\n\nIt is 5.<|im_end|>"),
    ("qwen3_5_think", "\n</think>\n\nIt is 5.<|im_end|>"),
    ("qwen3_5_nothink", "It is 5.<|im_end|>"),
    ("deepseek_r1_distill", "</think>\n\nIt is 5.<｜end▁of▁sentence｜>"),
]


@pytest.mark.parametrize(("name", "text"), ENDS)
def test_what_is_learned_is_the_template_s_continuation_with_its_end(name: str, text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    task = task_of(tmp_path, {"messages": [HI, FIVE]})
    made = demonstration_experience(task, tokenizer, tokenizer.eos_token_id)
    assert learned(made, tokenizer) == text
    prompt = encode_prompt(task, tokenizer)
    assert made.token_ids[: len(prompt)].tolist() == prompt
    assert int(made.token_ids[-1]) in load_renderer(tokenizer, stop_ids=tokenizer.stop_ids).stop_ids


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama3_1", "gptoss", "deepseek_r1_distill"])
def test_a_response_that_is_a_part_of_the_end_s_text_has_one_end(name: str) -> None:
    tokenizer = tokenizer_of(name)
    renderer = load_renderer(tokenizer, stop_ids=tokenizer.stop_ids)
    for text in (*"deimnot", "end", "turn", "call"):
        answer = renderer.demonstration_pieces([HI, {**FIVE, "content": text}], 1)[-1][0]
        usual = renderer.demonstration_pieces([HI, FIVE], 1)[-1][0]
        assert answer == usual.replace(FIVE["content"], text)
        assert renderer.demonstration([HI, {**FIVE, "content": text}], 1)[1][-1]
    calling = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "call", "arguments": {}}}]}
    tools = [{**WEATHER, "function": {**WEATHER["function"], "name": "call"}}]
    if renderer.template.supports_tools:
        called = renderer.demonstration_pieces([HI, calling], 1, tools)[-1][0]
        assert called.count(renderer.template.call_end) == 1


@pytest.mark.parametrize(("name", "end"), [("qwen3", "<|im_end|>"), ("gemma3", "<eos>"), ("gptoss", "<|return|>")])
@pytest.mark.parametrize("form", ["one {} two", "one{}"])
def test_responses_with_the_text_of_an_end_are_refused(name: str, end: str, form: str, tmp_path: Path) -> None:
    tokenizer, text = tokenizer_of(name), form.format(end)
    answer = {"role": "assistant", "content": text}
    wanted = f"task rows:0: the response has {re.escape(repr(end))}, at which generation ends, before its end"
    with pytest.raises(TasksetError, match=wanted):
        demonstration_experience(task_of(tmp_path, {"messages": [HI, answer]}), tokenizer, 0)
    longer = task_of(tmp_path, {"messages": [HI, answer, ASKED, FIVE]})
    assert learned(demonstration_experience(longer, tokenizer, 0), tokenizer).count(FIVE["content"]) == 1
    if form == "one {} two":
        with pytest.raises(TasksetError, match=wanted):
            demonstration_experience(longer, tokenizer, 0, "all")


def test_reasoning_that_never_ends_is_not_imitated(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3_5_think")
    cut = {"role": "assistant", "content": "<think>Two and"}
    with pytest.raises(TasksetError, match="task rows:0: the response opens reasoning and never closes it"):
        demonstration_experience(task_of(tmp_path, {"messages": [HI, cut]}), tokenizer, 0)
    pair = task_of(tmp_path, {"prompt": [HI], "chosen": [FIVE], "rejected": [cut]})  # what to avoid may be cut off
    assert len(preference_pair(pair, tokenizer, 0, "g")) == 2


@pytest.mark.parametrize("text", ["one <|im_end|> two", "The tag <think> opens and </think> closes."])
def test_check_finds_a_text_that_is_refused_among_others(text: str, tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": each} for each in ("It is 5.", "Six.", text)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": [HI, each]}) + "\n" for each in said))
    tasks = load_taskset(TasksetConfig(path=tmp_path / "rows.jsonl")).tasks
    with pytest.raises(TasksetError, match="task rows:2: "):
        check_chats(tasks, tokenizer_of("qwen3"), rolled_out=False, imitated=True)


def test_an_end_in_the_history_at_which_generation_does_not_end_is_not_learned(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("gptoss")
    task = task_of(tmp_path, {"messages": [HI, FIVE, ASKED, {"role": "assistant", "content": "Six."}]})
    made = demonstration_experience(task, tokenizer, 0, "all")
    final = "<|channel|>final<|message|>"
    assert "It is 5.<|end|>" in tokenizer.decode(made.token_ids.tolist())
    assert learned(made, tokenizer) == f"{final}It is 5.{final}Six.<|return|>"


@pytest.mark.parametrize(("name", "text"), ENDS[:4])
def test_pairs_and_labelled_completions_end_alike(name: str, text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    row = {"prompt": [HI], "chosen": [FIVE], "rejected": [{"role": "assistant", "content": "Six."}]}
    chosen, rejected = preference_pair(task_of(tmp_path, row), tokenizer, tokenizer.eos_token_id, "g")
    assert (learned(chosen, tokenizer), learned(rejected, tokenizer)) == (text, text.replace("It is 5.", "Six."))
    row = {"prompt": [HI], "completion": [FIVE], "label": True}
    assert learned(labelled_experience(task_of(tmp_path, row), tokenizer, 0, "g"), tokenizer) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "<think>\nFive.\n</think>\n\nIt is 5.<|im_end|>"),
        ("qwen3_5_think", "Five.\n</think>\n\nIt is 5.<|im_end|>"),
        ("deepseek_r1_distill", "Five.\n</think>\n\nIt is 5.<｜end▁of▁sentence｜>"),
        ("glm4moe", "\n<think>Five.</think>\nIt is 5.<|user|>"),
    ],
)
@pytest.mark.parametrize("form", ["field", "tags"])
def test_reasoning_of_the_last_message_is_learned(name: str, text: str, form: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    answer = {**FIVE, "reasoning_content": "Five."}
    if form == "tags":
        answer = {"role": "assistant", "content": "<think>\nFive.\n</think>\n\nIt is 5."}
    made = demonstration_experience(task_of(tmp_path, {"messages": [HI, answer]}), tokenizer, 0)
    assert learned(made, tokenizer) == text


def test_reasoning_that_a_template_drops_is_refused(tmp_path: Path) -> None:
    task = task_of(tmp_path, {"messages": [HI, {**FIVE, "reasoning_content": "Five."}]})
    with pytest.raises(TasksetError, match=r"task rows:0: .* does not show the reasoning of the last message"):
        demonstration_experience(task, tokenizer_of("gemma3"), 0)
    off = task_of(
        tmp_path,
        {"messages": [HI, {**FIVE, "reasoning_content": "Five."}], "chat_template_kwargs": {"enable_thinking": False}},
    )
    with pytest.raises(TasksetError, match="thinking is switched off"):
        demonstration_experience(off, tokenizer_of("qwen3"), 0)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss"])
def test_calls_are_learned_in_the_model_s_own_form_with_one_end(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    task = task_of(tmp_path, {"messages": [HI, CALLING], "tools": [WEATHER]})
    made = demonstration_experience(task, tokenizer, tokenizer.eos_token_id)
    renderer = load_renderer(tokenizer, stop_ids=tokenizer.stop_ids)
    text = learned(made, tokenizer)
    assert text.count(renderer.template.call_end) == 1
    assert text.endswith(renderer.template.call_end)
    prompt = encode_prompt(task, tokenizer)
    reply = renderer.parse(made.token_ids[len(prompt) :].tolist(), prompt, [WEATHER])
    assert [(each.name, each.arguments) for each in reply.tool_calls] == [("weather", {"city": "Oslo"})]


def test_a_response_of_several_messages_is_learned_in_all_of_its_turns(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    row = {"prompt": [HI], "completion": [CALLING, RESULT, FIVE], "tools": [WEATHER]}
    made = demonstration_experience(task_of(tmp_path, row), tokenizer, 0)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    assert learned(made, tokenizer) == f"{call}It is 5.<|im_end|>"
    assert [turn.role for turn in made.turns] == ["prompt", "assistant", "prompt", "assistant"]
    whole = tokenizer.apply_chat_template([HI, CALLING, RESULT, FIVE], tools=[WEATHER], tokenize=False)
    assert tokenizer.decode(made.token_ids.tolist()) == whole.rstrip()


@pytest.mark.parametrize("name", ["gptoss", "mistralai-Mistral-Nemo-Instruct-2407", "MiniMax-M2", "qwen3", "glm4moe"])
def test_calls_before_the_last_turn_are_learned_though_templates_refuse_results_without_them(name: str) -> None:
    tokenizer = tokenizer_of(name)
    renderer = load_renderer(tokenizer, stop_ids=tokenizer.stop_ids)
    turns = [
        text for text, learns in renderer.demonstration_pieces([HI, CALLING, RESULT, FIVE], 1, [WEATHER]) if learns
    ]
    assert len(turns) == 2
    assert "Oslo" in turns[0]
    assert turns[0].endswith(renderer.template.call_end)
    assert FIVE["content"] in turns[1]


def test_earlier_turns_are_learned_if_that_is_asked_for(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama3")
    task = task_of(tmp_path, {"messages": [HI, FIVE, ASKED, {"role": "assistant", "content": "Six."}]})
    assert learned(demonstration_experience(task, tokenizer, 0), tokenizer) == "Six.<|eot_id|>"
    assert learned(demonstration_experience(task, tokenizer, 0, "all"), tokenizer) == "It is 5.<|eot_id|>Six.<|eot_id|>"


def test_reasoning_of_earlier_turns_that_is_not_learned_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thought = FIVE | {"reasoning_content": "Two and three."}
    tokenizer = tokenizer_of("qwen3")
    task = task_of(tmp_path, {"messages": [HI, thought, ASKED, thought]})
    for _ in range(2):
        made = demonstration_experience(task, tokenizer, 0, "all")
    assert learned(made, tokenizer).count("Two and three.") == 1
    assert [each.message for each in caplog.records if "reasoning of turns before" in each.message] == [
        "the chat template drops the reasoning of turns before the last one; these are learned without it"
    ]


def test_switches_of_rows_and_tasksets_reach_the_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    row = {"messages": [HI, FIVE], "chat_template_kwargs": {"enable_thinking": False}}
    task = task_of(tmp_path, row)
    assert tokenizer.decode(encode_prompt(task, tokenizer)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert learned(demonstration_experience(task, tokenizer, 0), tokenizer) == "It is 5.<|im_end|>"
    plain = task_of(tmp_path, {"messages": [HI, FIVE]}, chat_template_kwargs={"enable_thinking": False})
    assert encode_prompt(plain, tokenizer) == encode_prompt(task, tokenizer)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "developer", "content": "Be brief."}, HI], "message 1, of the role `developer`"),
        ([HI, FIVE, {"role": "note", "content": "x"}, ASKED], "message 3, of the role `note`"),
    ],
)
def test_messages_that_the_template_does_not_show_are_refused(messages: list[Any], what: str, tmp_path: Path) -> None:
    task = task_of(tmp_path, {"prompt": messages})
    with pytest.raises(TasksetError, match=f"task rows:0: the tokenizer's chat template does not show {what}"):
        encode_prompt(task, tokenizer_of("qwen3"))


@pytest.mark.parametrize("name", ["llama3_2", "gptoss"])
def test_the_date_in_a_prompt_is_that_of_the_run_s_start(name: str, tmp_path: Path) -> None:
    tokenizer, task = tokenizer_of(name), task_of(tmp_path, {"prompt": [HI]})
    today = encode_prompt(task, tokenizer)
    tokenizer.template_day, tokenizer.renderer = date(2024, 2, 29), None
    start = encode_prompt(task, tokenizer)
    assert any(day in tokenizer.decode(start) for day in ("29 Feb 2024", "2024-02-29"))
    assert start != today
    save_run_tokenizer(tmp_path, tokenizer, 1)
    resumed = tokenizer_of(name)
    use_run_date(tmp_path, resumed)
    assert encode_prompt(task, resumed) == start
    assert encode_prompt(task, load_run_tokenizer(tmp_path).tokenizer) == start


def test_a_tokenizer_without_any_end_is_refused() -> None:
    tokenizer, _ = stand_in(template("qwen2_5"))
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    plain.chat_template = tokenizer.chat_template
    with pytest.raises(TasksetError, match="the tokenizer has no eos_token"):
        encode_demonstration(Task("t", [Message(**HI)], response="It is 5."), plain, 0)


# -- texts -----------------------------------------------------------------------------------------------------


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's, which puts a space before a text."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *"0123456789+=", "▁2", "▁6"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "2"), ("▁", "6")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_no_space_is_put_between_prompt_and_response() -> None:
    tokenizer = metaspace()
    ids, mask = encode_demonstration(Task("t", "2+4=", response="6"), tokenizer, 2)
    prompt = encode_prompt(Task("t", "2+4="), tokenizer)
    assert ids[: len(prompt)] == prompt
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁2", "+", "4", "=", "6", "</s>"]
    assert mask == [False] * 5 + [True] * 2


def test_a_prompt_that_begins_with_bos_gets_one() -> None:
    tokenizer = metaspace()
    assert encode_prompt(Task("t", "<s>2+4="), tokenizer).count(1) == 1
    assert encode_prompt(Task("t", "2+4="), tokenizer).count(1) == 1


def test_a_response_that_ends_with_the_end_gets_no_second_one() -> None:
    tokenizer = metaspace()
    ids, _ = encode_demonstration(Task("t", "2+4=", response="6</s>"), tokenizer, 2)
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["6", "</s>"]


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "glm4moe", "gemma3", "qwen3"])
def test_another_answer_to_a_rollout_s_prompt_is_written_as_the_template_does(name: str, tmp_path: Path) -> None:
    """As people edit it, or an operator of a pipeline writes it."""
    tokenizer = tokenizer_of(name)
    made = demonstration_experience(task_of(tmp_path, {"messages": [HI, FIVE]}), tokenizer, 0)
    made.stop_reason = StopReason.EOS
    text = tokenizer.decode(encode_answer("Six.", made, tokenizer, 0))
    assert text == learned(made, tokenizer).replace(FIVE["content"], "Six.")
    if name == "qwen3_5_think":
        own = tokenizer.decode(encode_answer("Five and one.\n</think>\n\nSix.", made, tokenizer, 0))
        assert own == "Five and one.\n</think>\n\nSix.<|im_end|>"
