"""Rows as TRL, verl, verifiers, prime-rl and Trinity-RFT write them become tasks without settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import templated

from rollmill.cli import main
from rollmill.config.taskset import TasksetConfig
from rollmill.data import encode_demonstration, load_taskset, render_prompt
from rollmill.data.layouts import REJECTED_MESSAGE, RESPONSE_MESSAGE, RESPONSE_MESSAGES, SWITCHES, TOOLS
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
    if suffix == "":
        import datasets

        datasets.Dataset.from_list(list(rows)).save_to_disk(path)
    elif suffix == ".parquet":
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
    ids, mask = encode_demonstration(task, tokenizer, next(iter(ends)))
    whole = tokenizer.apply_chat_template([ASK, CALLING], tools=[LIGHT], tokenize=False)
    assert tokenizer.decode(ids) == whole.rstrip()
    assert '"name": "control_light"' in tokenizer.decode(ids[mask.index(True) :])
    assert "control_light" in (task.response or "")


def test_templates_without_tools_are_refused(tmp_path: Path) -> None:
    row = {"prompt": [ASK], "tools": [LIGHT]}
    tokenizer, _ = templated("chatml")
    [task] = tasks_of(tmp_path, row)
    with pytest.raises(
        TasksetError, match="task rows:0: the tokenizer's chat template does not show the tool `control_light`"
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


# -- nulls ----------------------------------------------------------------------------------------------------------


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": properties}}


def test_nulls_of_json_stay(tmp_path: Path) -> None:
    schema = tool("search", day={"type": ["string", "null"], "default": None, "enum": ["Monday", None]})
    row = {"messages": [ASK, calling("search", {"day": None, "where": {"city": None}})], "tools": [schema]}
    [task] = tasks_of(tmp_path, row)
    assert task.metadata[TOOLS] == [schema]
    [call] = task.metadata[RESPONSE_MESSAGE]["tool_calls"]
    assert call["function"]["arguments"] == {"day": None, "where": {"city": None}}
    assert '"day": null' in (task.response or "")


@pytest.mark.parametrize("suffix", [".parquet", ""])
def test_nulls_that_only_fill_a_table_are_left_out(suffix: str, tmp_path: Path) -> None:
    """Every struct of a column has the keys of all rows, at any depth."""
    first, second = tool("sum", filter={"type": "integer", "minimum": 1}), tool("find", word={"type": "string"})
    rows: list[dict[str, Any]] = [
        {"messages": [ASK, calling("sum", {"filter": {"max": 3}})], "tools": [first], "info": {"level": None, "a": 1}},
        {"messages": [ASK, calling("find", {"filter": {"unit": "m"}})], "tools": [second], "info": {"level": 2}},
        {"messages": [ASK, SKY | {"thinking": "Hm."}], "tools": [second], "chat_template_kwargs": {"effort": "low"}},
    ]
    rows[0]["chat_template_kwargs"] = {"enable_thinking": False}
    one, two, three = tasks_of(tmp_path, *rows, suffix=suffix)
    assert (one.metadata[TOOLS], two.metadata[TOOLS]) == ([first], [second])
    assert one.metadata[RESPONSE_MESSAGE]["tool_calls"][0]["function"]["arguments"] == {"filter": {"max": 3}}
    assert two.metadata[RESPONSE_MESSAGE]["tool_calls"][0]["function"]["arguments"] == {"filter": {"unit": "m"}}
    assert one.response == '{"name": "sum", "arguments": {"filter": {"max": 3}}}'
    assert one.metadata["tools"] == [first]
    assert (one.metadata[SWITCHES], three.metadata[SWITCHES]) == ({"enable_thinking": False}, {"effort": "low"})
    assert SWITCHES not in two.metadata
    assert one.metadata["info"] == {"level": None, "a": 1}  # a column of the user's own is as it is in the table


def test_json_columns_of_datasets_keep_their_nulls(tmp_path: Path) -> None:
    import datasets

    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no JSON columns")
    rows = [{"prompt": "x", "tools": [tool("f", day={"default": None})]}, {"prompt": "y", "tools": [{"name": "g"}]}]
    features = datasets.Features({"prompt": datasets.Value("string"), "tools": datasets.List(datasets.Json())})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "rows")
    tasks = load_taskset(TasksetConfig(path=tmp_path / "rows")).tasks
    assert [task.metadata[TOOLS] for task in tasks] == [row["tools"] for row in rows]


RUN = {"model": {"new": {"tokenizer": {"kind": "char"}}}, "rewards": [{"name": "tool_call"}], "steps": 1}


def checked(tmp_path: Path, *rows: dict[str, Any], suffix: str = ".jsonl", **keys: Any) -> int:
    """Exit code of `rollmill check` for a run with these rows."""
    tasks_of(tmp_path, *rows, suffix=suffix)
    run = RUN | {"taskset": {"path": str(tmp_path / f"rows{suffix}")}} | keys
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    return main(["check", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_a_table_of_several_tools_can_be_scored(suffix: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "x", "tools": [tool("sum", a={"type": "integer", "minimum": 1})]},
        {"prompt": "y", "tools": [tool("find", word={"type": "string"})]},
    ]
    rows[0]["tool_calls"] = [{"name": "sum", "arguments": {"a": 1}}]
    rows[1]["tool_calls"] = [{"name": "find", "arguments": {"word": "b"}}]
    assert checked(tmp_path, *rows, suffix=suffix) == 0
    as_text = [{key: each if key == "prompt" else json.dumps(each) for key, each in row.items()} for row in rows]
    assert checked(tmp_path, *as_text) == 0


@pytest.mark.parametrize(
    ("columns", "reward", "reason"),
    [
        ({"tools": [tool("f") | {"parameters": {"type": "integr"}}]}, {"name": "tool_call"}, "not a JSON Schema"),
        ({"tools": "hammer"}, {"name": "tool_call"}, "the task's column `tools` has None; expected a list"),
        (
            {"tools": [tool("f")], "tool_calls": [{"name": "g"}]},
            {"name": "tool_call"},
            "which its column `tools` lacks",
        ),
        (
            {"tools": [tool("f", a={"type": "integer"})], "tool_calls": [{"name": "f", "arguments": {"a": "b"}}]},
            {"name": "tool_call"},
            "has a call that its column `tools` rejects",
        ),
        ({"form": {"type": 3}}, {"name": "format", "schema_column": "form"}, "column form: not a JSON Schema"),
    ],
)
def test_check_refuses_schemas_that_no_reward_can_use(
    columns: dict[str, Any], reward: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path, {"prompt": "x"} | columns, rewards=[reward]) == 2
    said = capsys.readouterr().err
    assert f"stage train: taskset: task `rows:0`, reward `{reward['name']}`: " in said
    assert reason in said


# -- switches of the chat template ------------------------------------------------------------------------------------


def test_switches_of_rows_and_of_the_taskset(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": [USER], "chat_template_kwargs": '{"enable_thinking": true}'},
        {"prompt": [USER], "chat_template_kwargs": None},
        {"prompt": [USER]},
        {"messages": [USER, SKY], "enable_thinking": True},  # verl's
    ]
    alone = [task.metadata.get(SWITCHES) for task in tasks_of(tmp_path, *rows)]
    assert alone == [{"enable_thinking": False}, {"enable_thinking": True}, None, None, {"enable_thinking": True}]
    given = {"enable_thinking": 0, "effort": "low"}
    merged = [task.metadata[SWITCHES] for task in tasks_of(tmp_path, *rows, chat_template_kwargs=given)]
    assert merged == [given | {"enable_thinking": False}, given | {"enable_thinking": True}, given, given, merged[1]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1], r"chat_template_kwargs is \[1\]; give an object of values for the chat template"),
        ("thinking", "chat_template_kwargs is 'thinking'; give an object"),
        ({"tools": []}, "chat_template_kwargs has tools, which is set by rollmill itself"),
    ],
)
def test_wrong_switches_are_refused(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match=reason):
        tasks_of(tmp_path, {"prompt": [USER], "chat_template_kwargs": value})


def test_switches_of_a_taskset_need_a_chat(tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match=r"taskset\.chat_template_kwargs: no prompt of rows is a chat"):
        tasks_of(tmp_path, {"prompt": "1+1"}, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(TasksetError, match=r"taskset\.chat_template_kwargs has tokenize"):
        tasks_of(tmp_path, {"prompt": "1+1"}, chat=True, chat_template_kwargs={"tokenize": True})


def test_other_switches_are_another_taskset(tmp_path: Path) -> None:
    def mark(**keys: Any) -> str:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [USER]}))
        return load_taskset(TasksetConfig.model_validate({"path": tmp_path / "rows.jsonl", **keys})).fingerprint()

    assert mark() == mark(chat_template_kwargs={}) != mark(chat_template_kwargs={"enable_thinking": False})


# -- whole messages as solutions ---------------------------------------------------------------------------------------

THOUGHT = SKY | {"reasoning_content": "Rayleigh."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("reasoning", ["reasoning_content", "thinking"])
def test_reasoning_of_a_solution_is_kept(reasoning: str, suffix: str, tmp_path: Path) -> None:
    last = SKY | {reasoning: "Rayleigh."}
    earlier = [USER, {"role": "assistant", "content": "Blue.", reasoning: "Easy."}, USER]
    for row in (
        {"messages": [*earlier, last]},
        {"prompt": earlier, "completion": [last]},
        {"prompt": earlier, "response": last},
        {"prompt": earlier, "chosen": [last], "rejected": [GREEN]},
        {"chosen": [*earlier, last], "rejected": [*earlier, GREEN]},
    ):
        [task] = tasks_of(tmp_path, row, suffix=suffix)
        assert (task.response, task.metadata[RESPONSE_MESSAGE]) == ("It is blue.", THOUGHT)
        assert REJECTED_MESSAGE not in task.metadata
        assert task.prompt == [USER, {"role": "assistant", "content": "Blue.", "reasoning_content": "Easy."}, USER]
    [task] = tasks_of(tmp_path, {"messages": [USER, SKY]}, suffix=suffix)
    assert RESPONSE_MESSAGE not in task.metadata


def test_rejected_messages_are_kept(tmp_path: Path) -> None:
    [pair] = tasks_of(tmp_path, {"prompt": [ASK], "chosen": [SKY], "rejected": [CALLING]})
    assert (pair.metadata[REJECTED_MESSAGE], RESPONSE_MESSAGE in pair.metadata) == (CALLED, False)
    assert "control_light" in (pair.rejected or "")
    [labelled] = tasks_of(tmp_path, {"prompt": [USER], "completion": [THOUGHT], "label": False})
    assert (labelled.rejected, labelled.metadata[REJECTED_MESSAGE]) == ("It is blue.", THOUGHT)
    [templated_row] = tasks_of(
        tmp_path, {"prompt": [USER], "response": [THOUGHT], "text": "Blue."}, response_template="{text}"
    )
    assert (templated_row.response, RESPONSE_MESSAGE in templated_row.metadata) == ("Blue.", False)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("column", ["completion", "response", "chosen"])
def test_a_solution_of_several_messages_is_kept_whole(column: str, suffix: str, tmp_path: Path) -> None:
    done = {"role": "assistant", "content": "Done!", "thinking": "It is on."}
    [task] = tasks_of(tmp_path, {"prompt": [ASK], column: [CALLING, RESULT, done], "tools": [LIGHT]}, suffix=suffix)
    assert (task.prompt, task.response) == ([ASK], "Done!")
    last = {"role": "assistant", "content": "Done!", "reasoning_content": "It is on."}
    assert task.metadata[RESPONSE_MESSAGES] == [CALLED, RESULT, last]
    assert RESPONSE_MESSAGE not in task.metadata


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"completion": [CALLING, RESULT]}, "the response is a list, not text or messages that begin and end with one"),
        ({"completion": [USER, SKY]}, "not text or messages that begin and end with one of the assistant"),
        ({"chosen": [CALLING, RESULT, SKY], "rejected": [SKY]}, "solutions of several messages cannot be compared"),
        ({"chosen": [SKY], "rejected": [CALLING, RESULT, SKY]}, "solutions of several messages cannot be compared"),
        ({"completion": [CALLING, RESULT, SKY], "label": True}, "has a label .* and several messages"),
        ({"completion": [THOUGHT | {"thinking": "No."}]}, "message 0 of the response has .*thinking, which differ"),
        ({"completion": [SKY | {"weight": 1}]}, "message 0 of the response has weight; only role, content"),
        ({"completion": [SKY | {"content": [{"type": "image"}]}]}, "message 0 of the response has a picture"),
    ],
)
def test_solutions_that_cannot_be_read_say_why(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match=reason):
        tasks_of(tmp_path, {"prompt": [USER]} | row)
