"""Which column plays which part: fields, templates, chats, ids, presets."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.taskset import TasksetConfig
from rollmill.data.readers import BadRowError, SourceRow
from rollmill.data.task_builder import TaskBuilder
from rollmill.data.template import PromptTemplate
from rollmill.errors import TasksetError
from rollmill.types import Task

ROW = {"question": "1+1", "gold": 2, "work": "two", "key": "k1", "extra": [1]}


def task_of(row: dict[str, Any], **keys: Any) -> Task:
    config = TasksetConfig.model_validate({"path": "rows.jsonl", **keys})
    return TaskBuilder(config, "rows").task(SourceRow("rows.jsonl:1", row), 4)


def test_fields_name_the_columns_and_the_rest_is_metadata() -> None:
    fields = {"prompt": "question", "answer": "gold", "response": "work", "id": "key"}
    assert task_of(ROW, fields=fields) == Task("k1", "1+1", 2, "two", {"extra": [1]}, "rows")


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ({"chosen": "good", "rejected": "bad"}, {}, ("good", "bad", {})),
        ({"response": "good", "rejected": "bad"}, {}, ("good", "bad", {})),
        ({"chosen": "good", "response": "mine", "rejected": "bad"}, {}, ("mine", "bad", {"chosen": "good"})),
        (
            {"chosen": "good", "response": "mine", "rejected": "bad"},
            {"response": "chosen"},
            ("good", "bad", {"response": "mine"}),
        ),
        (
            {"best": "good", "worst": "bad", "rejected": "x"},
            {"response": "best", "rejected": "worst"},
            ("good", "bad", {"rejected": "x"}),
        ),
        ({"chosen": "good", "rejected": ""}, {}, ("good", None, {})),
        ({"chosen": "good"}, {}, ("good", None, {})),
    ],
)
def test_preference_sets_have_a_chosen_and_a_rejected_solution(
    row: dict[str, Any], fields: dict[str, str], expected: tuple[str, str | None, dict[str, Any]]
) -> None:
    task = task_of({"prompt": "1+1"} | row, fields=fields)
    assert (task.response, task.rejected, task.metadata) == expected


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ({"completion": "it", "label": True}, {}, ("it", None, {})),
        ({"completion": "it", "label": False}, {}, (None, "it", {})),
        ({"completion": "it", "label": 1}, {}, ("it", None, {})),
        ({"completion": "it", "label": 0.0}, {}, (None, "it", {})),
        ({"completion": "it", "label": "False"}, {}, (None, "it", {})),
        ({"completion": [{"role": "assistant", "content": "it"}], "label": False}, {}, (None, "it", {})),
        ({"text": "it", "liked": True}, {"response": "text", "label": "liked"}, ("it", None, {})),
        ({"response": "it", "liked": False}, {"label": "liked"}, (None, "it", {})),
        ({"completion": "it", "liked": False}, {"label": "liked"}, (None, "it", {})),
        ({"completion": "it"}, {}, ("it", None, {})),
        # no labels: columns that are called so for another reason
        ({"label": 3}, {}, (None, None, {"label": 3})),
        ({"completion": "x", "label": "y", "response": "it"}, {}, ("it", None, {"completion": "x", "label": "y"})),
        (
            {"completion": "x", "label": "y", "z": "it"},
            {"response": "z"},
            ("it", None, {"completion": "x", "label": "y"}),
        ),
    ],
)
def test_labelled_sets_have_one_solution_and_what_it_is_worth(
    row: dict[str, Any], fields: dict[str, str], expected: tuple[str | None, str | None, dict[str, Any]]
) -> None:
    task = task_of({"prompt": "1+1"} | row, fields=fields)
    assert (task.response, task.rejected, task.metadata) == expected


def test_a_solution_may_be_the_assistants_one_message() -> None:
    message = [{"role": "assistant", "content": "2"}]
    task = task_of({"prompt": [{"role": "user", "content": "1+1"}], "chosen": message, "rejected": message})
    assert (task.response, task.rejected) == ("2", "2")


def test_templates_make_prompt_and_response_and_values_are_not_templates() -> None:
    task = task_of(
        ROW | {"question": "{gold} {{?"}, template="Q {question}, {{{gold}}}:", response_template="{work}={gold}"
    )
    assert (task.prompt, task.response, task.id) == ("Q {gold} {{?, {2}:", "two=2", "rows:4")


def test_chat_wraps_text_and_keeps_messages() -> None:
    user = {"role": "user", "content": "1+1"}
    system = {"role": "system", "content": "Add."}
    assert task_of({"prompt": "1+1"}, chat=True).prompt == [user]
    assert task_of({"prompt": "1+1"}, chat=True, system="Add.").prompt == [system, user]
    assert task_of({"prompt": [system, user]}).prompt == [system, user]
    assert task_of({"prompt": [user]}, chat=True, system="Add.").prompt == [system, user]
    assert task_of({"prompt": [user | {"name": None}]}).prompt == [user]
    with pytest.raises(BadRowError, match=r"a system message of its own beside taskset.system"):
        task_of({"prompt": [system, user]}, chat=True, system="Add.")


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"a": 1, "b": 2}, {"template": "{c}"}, r"taskset.template names \{c\}, but the columns are a, b"),
        ({"a": None}, {"template": "{a}"}, r"taskset.template: column a is empty \(null\), not text or a number"),
        ({"a": {"b": 1}}, {"template": "{a}"}, "column a is an object, not text or a number"),
        ({"a": " "}, {"template": "{a}"}, "the prompt is empty"),
        ({"prompt": "x"}, {"response_template": "{work}"}, r"taskset.response_template names \{work\}"),
        (
            {"prompt": "x"},
            {"fields": {"answer": "gold"}},
            r"no column gold \(columns: prompt\); .* taskset.fields.answer",
        ),
        ({"prompt": "x"}, {"fields": {"response": "work"}}, "no column work .* taskset.fields.response"),
        ({"prompt": "x"}, {"fields": {"rejected": "bad"}}, "no column bad .* taskset.fields.rejected"),
        ({"prompt": "x", "chosen": ["y"]}, {}, "the chosen is a list, not text"),
        ({"prompt": "x", "rejected": 3}, {}, "the rejected is a number, not text"),
        ({"prompt": "x", "chosen": [{"role": "user", "content": "y"}]}, {}, "not text or messages that begin and end"),
        (
            {"prompt": "x", "completion": "y", "label": "good"},
            {},
            r"the label \(column label\) is `good`, not true \(desirable\) or false \(undesirable\)",
        ),
        ({"prompt": "x", "completion": "y", "label": 2}, {}, r"the label \(column label\) is `2`, not true"),
        (
            {"prompt": "x", "completion": "y", "label": None},
            {},
            r"the label \(column label\) is empty \(null\), not true",
        ),
        ({"prompt": "x", "completion": "", "label": True}, {}, r"has a label \(column label\) but no completion; name"),
        ({"prompt": "x", "response": "y"}, {"fields": {"label": "liked"}}, "no column liked .* taskset.fields.label"),
        (
            {"prompt": "x", "chosen": "y", "rejected": "z", "liked": True},
            {"fields": {"label": "liked"}},
            r"has a label \(column liked\) and a rejected solution; remove one of them",
        ),
        ({"prompt": "x", "rejected": "\ud800"}, {}, "not valid Unicode text"),
        ({"prompt": "x"}, {"fields": {"id": "key"}}, "no column key .* taskset.fields.id"),
        ({"prompt": "x", "key": None}, {"fields": {"id": "key"}}, r"column key is empty \(null\), not an id"),
        ({"prompt": "x", "key": ""}, {"fields": {"id": "key"}}, "column key is empty, not an id"),
        ({"prompt": "x", "key": 1.5}, {"fields": {"id": "key"}}, "column key is a number, not an id"),
        ({"question": "x"}, {"preset": "gsm8k"}, r"no column answer \(columns: question\)"),
        ({"question": "x", "answer": 3}, {"preset": "gsm8k"}, "column answer is a number, not text"),
        ({"question": "x", "answer": "3"}, {"preset": "gsm8k"}, "the answer has no number after ####"),
        ({"question": "x", "answer": "3\n#### "}, {"preset": "gsm8k"}, "the answer has no number after ####"),
        ({"question": "", "answer": "#### 3"}, {"preset": "gsm8k"}, "the prompt is empty"),
        ({"task_id": "1", "prompt": "x"}, {"preset": "humaneval"}, r"no column entry_point \(columns: task_id"),
        ({"task_id": 1, "prompt": "x"}, {"preset": "humaneval"}, "column task_id is a number, not text"),
    ],
)
def test_rows_that_do_not_fit_say_why(row: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRowError, match=message):
        task_of(row, **keys)


def test_gsm8k_and_templates_work_together() -> None:
    row = {"question": "Q?", "answer": "It is <<1000+234=1234>>1,234.\n#### 1,234"}
    plain = task_of(row, preset="gsm8k")
    assert (plain.prompt, plain.answer, plain.response) == ("Q?", "1234", "It is 1,234.\n#### 1,234")
    task = task_of(
        row, preset="gsm8k", template="{question}\n", response_template="{solution} \\boxed{{{answer}}}", chat=True
    )
    assert task.prompt == [{"role": "user", "content": "Q?\n"}]
    assert task.response == "It is 1,234. \\boxed{1234}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a.b}", r"\{a.b\} reaches into a column"),
        ("{a.__class__}", r"reaches into a column"),
        ("{a[0]}", r"\{a\[0\]\} reaches into a column"),
        ("{a!r}", r"\{a\} has a format code"),
        ("{a:>10}", r"\{a\} has a format code"),
        ("{a:{b}}", r"\{a\} has a format code"),
        ("{}", r"\{\} names no column"),
        ("{a", r"; write \{column\} for a column, \{\{ and \}\} for braces"),
        ("a}", r"; write \{column\} for a column, \{\{ and \}\} for braces"),
        ("no column {{a}}", "names no column, so every task would be the same"),
        ("", "names no column"),
    ],
)
def test_what_is_no_template_is_refused_by_key(text: str, message: str) -> None:
    with pytest.raises(TasksetError, match=f"^taskset.template.*{message}"):
        TaskBuilder(TasksetConfig.model_validate({"path": "x.jsonl", "template": text}), "x")


def test_two_keys_for_one_part_are_refused() -> None:
    for keys, message in [
        ({"template": "{a}", "fields": {"prompt": "a"}}, "taskset.fields.prompt and taskset.template"),
        (
            {"response_template": "{a}", "fields": {"response": "a"}},
            "taskset.fields.response and taskset.response_temp",
        ),
    ]:
        with pytest.raises(TasksetError, match=message):
            TaskBuilder(TasksetConfig.model_validate({"path": "x.jsonl", **keys}), "x")


columns = st.text(string.ascii_letters + "_ ", min_size=1)


@given(st.lists(st.tuples(st.text(), columns, st.text()), min_size=1), st.text())
def test_a_template_is_its_text_with_values_put_in(parts: list[tuple[str, str, str]], tail: str) -> None:
    row: dict[str, str] = {}
    text, expected = "", ""
    for before, column, value in parts:
        value = row.setdefault(column, value)
        text += before.replace("{", "{{").replace("}", "}}") + "{" + column + "}"
        expected += before + value
    text += tail.replace("{", "{{").replace("}", "}}")
    assert PromptTemplate(text, "template").fill(row) == expected + tail
