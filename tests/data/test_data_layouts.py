"""Rows as TRL, verl, verifiers, prime-rl and Trinity-RFT write them become tasks without settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import templated

from rollmill.config.taskset import TasksetConfig
from rollmill.data import encode_demonstration, load_taskset, render_prompt
from rollmill.errors import TasksetError
from rollmill.types import Task

USER, SKY = {"role": "user", "content": "What color is the sky?"}, {"role": "assistant", "content": "It is blue."}
SYSTEM = {"role": "system", "content": "Be brief."}
GREEN = {"role": "assistant", "content": "It is green."}
LIGHT = {
    "type": "function",
    "function": {
        "name": "control_light",
        "description": "Switches a light.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "state": {"type": "string"}},
            "required": ["room", "state"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "control_light", "arguments": {"room": "kitchen", "state": "on"}}}
ASK = {"role": "user", "content": "Turn on the kitchen light."}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "control_light", "content": "The light is on."}


def tasks_of(tmp_path: Path, *rows: dict[str, Any], suffix: str = ".jsonl", **keys: Any) -> list[Task]:
    """Tasks of a file with these rows."""
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_taskset(TasksetConfig.model_validate({"path": path, **keys})).tasks


def parts(task: Task) -> tuple[Any, Any, Any, Any]:
    return task.prompt, task.answer, task.response, task.rejected


TRL = {
    "prompt-only": ({"prompt": [USER]}, ([USER], None, None, None)),
    "prompt-completion": ({"prompt": "The sky is", "completion": " blue."}, ("The sky is", None, " blue.", None)),
    "prompt-completion, chat": ({"prompt": [USER], "completion": [SKY]}, ([USER], None, "It is blue.", None)),
    "language modeling, chat": ({"messages": [SYSTEM, USER, SKY]}, ([SYSTEM, USER], None, "It is blue.", None)),
    "messages without an answer": ({"messages": [SYSTEM, USER]}, ([SYSTEM, USER], None, None, None)),
    "preference": (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        ("The sky is", None, " blue.", " green."),
    ),
    "preference, chat": (
        {"prompt": [USER], "chosen": [SKY], "rejected": [GREEN]},
        ([USER], None, "It is blue.", "It is green."),
    ),
    "preference, implicit prompt": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        ("The sky is", None, " blue.", " green."),
    ),
    "preference, implicit prompt, chat": (
        {"chosen": [SYSTEM, USER, SKY], "rejected": [SYSTEM, USER, GREEN], "score_chosen": 8.0},
        ([SYSTEM, USER], None, "It is blue.", "It is green."),
    ),
    "preference, prompt beside whole conversations": (
        {"prompt": USER["content"], "prompt_id": "a", "chosen": [USER, SKY], "rejected": [USER, GREEN]},
        ([USER], None, "It is blue.", "It is green."),
    ),
    "unpaired preference, chat": (
        {"prompt": [USER], "completion": [GREEN], "label": False},
        ([USER], None, None, "It is green."),
    ),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("layout", TRL)
def test_layouts_of_trl(layout: str, suffix: str, tmp_path: Path) -> None:
    row, expected = TRL[layout]
    [task] = tasks_of(tmp_path, row, suffix=suffix)
    assert parts(task) == expected


def test_parquet_of_verl(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"content": f"{n} + 1? Put the final answer after ####.", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
            "extra_info": {"answer": f"So #### {n + 1}", "index": n, "question": f"{n} + 1?", "split": "train"},
        }
        for n in range(3)
    ]
    tasks = tasks_of(tmp_path, *rows, suffix=".parquet")
    assert [task.answer for task in tasks] == ["1", "2", "3"]
    assert tasks[1].prompt == [{"role": "user", "content": "1 + 1? Put the final answer after ####."}]
    assert tasks[2].metadata["extra_info"]["index"] == 2
    assert tasks[2].metadata["data_source"] == "openai/gsm8k"


def test_rows_of_verifiers_and_prime_rl(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"example_id": 0, "question": "1+1?", "answer": "2", "task": "sums", "info": '{"level": 3}'},
        {"example_id": 1, "prompt": [USER], "answer": "blue", "task": "sky", "info": {"level": 1}},
    ]
    one, two = tasks_of(tmp_path, *rows)
    assert (one.prompt, one.answer, one.metadata["info"], one.metadata["task"]) == ("1+1?", "2", {"level": 3}, "sums")
    assert parts(two) == ([USER], "blue", None, None)
    synthetic = {
        "problem_id": "vfm_1",
        "task_type": "verifiable_math",
        "prompt": "Solve 2x = 6.",
        "verification_info": '{"ground_truth": "3"}',
        "metadata": "{}",
    }
    [task] = tasks_of(tmp_path, synthetic)
    assert parts(task) == ("Solve 2x = 6.", "3", None, None)
    [task] = tasks_of(tmp_path, {"prompt": [SYSTEM, USER], "completion": [SKY]})  # its supervised fine-tuning
    assert parts(task) == ([SYSTEM, USER], None, "It is blue.", None)


def test_rows_of_trinity(tmp_path: Path) -> None:
    gsm8k = {"question": "How many are 2 and 3?", "answer": "2+3=<<2+3=5>>5\n#### 5"}
    [task] = tasks_of(tmp_path, gsm8k)
    assert parts(task) == ("How many are 2 and 3?", "5", "2+3=5\n#### 5", None)
    math = {"problem": "2x = 6", "solution": "So $x = 3$.", "answer": "3"}
    [task] = tasks_of(tmp_path, math)
    assert parts(task) == ("2x = 6", "3", "So $x = 3$.", None)
    [task] = tasks_of(tmp_path, {"prompt": [USER], "chosen": SKY, "rejected": GREEN})
    assert parts(task) == ([USER], None, "It is blue.", "It is green.")


def test_chat_and_a_system_message_wrap_a_question(tmp_path: Path) -> None:
    [task] = tasks_of(tmp_path, {"question": "1+1?", "answer": "2"}, chat=True, system="Be brief.")
    assert task.prompt == [SYSTEM, {"role": "user", "content": "1+1?"}]


def test_settings_win_over_what_is_recognised(tmp_path: Path) -> None:
    row = {"question": "a", "problem": "b", "answer": "1 #### 2", "solution": "s"}
    [task] = tasks_of(tmp_path, row, fields={"prompt": "problem"})
    assert parts(task) == ("b", "1 #### 2", None, None)
    [task] = tasks_of(tmp_path, row, template="{problem}?")
    assert parts(task) == ("b?", "1 #### 2", None, None)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tools_and_calls_are_written_by_the_chat_template(suffix: str, as_text: bool, tmp_path: Path) -> None:
    """TRL's example of tool calling: the calls before, and the schemas, are in the prompt."""
    arguments = {"room": "kitchen", "state": "on"}
    call = {"id": None, "type": "function", "function": {"name": "control_light", "arguments": arguments}}
    if as_text:  # OpenAI's form
        call["function"] = {"name": "control_light", "arguments": json.dumps(arguments)}
    row = {
        "messages": [
            ASK,
            {"role": "assistant", "tool_calls": [call]},
            RESULT,
            {"role": "assistant", "content": "Done!"},
        ],
        "tools": json.dumps([LIGHT]) if as_text else [LIGHT],
    }
    [task] = tasks_of(tmp_path, row, suffix=suffix)
    tokenizer, _ = templated("qwen3")
    expected = tokenizer.apply_chat_template(
        [ASK, CALLING, RESULT], tools=[LIGHT], add_generation_prompt=True, tokenize=False
    )
    assert render_prompt(task, tokenizer) == expected
    assert "control_light" in expected
    assert task.response == "Done!"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_a_response_that_calls_tools_has_the_form_of_the_template(name: str, tmp_path: Path) -> None:
    [task] = tasks_of(tmp_path, {"messages": [ASK, CALLING], "tools": [LIGHT]})
    tokenizer, ends = templated(name)
    ids, n_prompt = encode_demonstration(task, tokenizer, next(iter(ends)))
    whole = tokenizer.apply_chat_template([ASK, CALLING], tools=[LIGHT], tokenize=False)
    assert tokenizer.decode(ids) == whole.rstrip()
    assert '"name": "control_light"' in tokenizer.decode(ids[n_prompt:])
    assert "control_light" in (task.response or "")


def test_templates_without_tools_are_refused(tmp_path: Path) -> None:
    row = {"prompt": [ASK], "tools": [LIGHT]}
    tokenizer, _ = templated("chatml")
    [task] = tasks_of(tmp_path, row)
    with pytest.raises(
        TasksetError, match="the tool `control_light`, which the tokenizer's chat template does not show"
    ):
        render_prompt(task, tokenizer)
    [without] = tasks_of(tmp_path, row, fields={"tools": ""})
    assert "control_light" not in render_prompt(without, tokenizer)
    [plain] = tasks_of(tmp_path, {"prompt": [ASK], "tools": ["hammer"]})
    assert plain.metadata["tools"] == ["hammer"]
    assert "hammer" not in render_prompt(plain, tokenizer)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"chosen": [USER, SKY, USER, SKY], "rejected": [USER, GREEN, USER, SKY]},
            "chosen and rejected differ from message 1 on, and one message of the assistant is compared",
        ),
        ({"messages": [SKY]}, "the prompt is empty"),
        ({"prompt": [USER | {"weight": 1}]}, "message 0 of the prompt has weight; only role, content, name"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text"}]}]},
            "message 0 of the prompt has a part of type text without text",
        ),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "message 0 .* names no function"),
    ],
)
def test_what_cannot_be_read_says_why(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match=reason):
        tasks_of(tmp_path, row)
