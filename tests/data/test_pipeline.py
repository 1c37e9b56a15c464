"""Operators that prepare tasks: what they keep, change and drop, and what they say about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import rollmill
from rollmill.config import section as parts
from rollmill.config.loader import load_run
from rollmill.config.taskset import TasksetConfig
from rollmill.data import Taskset, load_taskset
from rollmill.data.operators import TaskBatch
from rollmill.data.operators.builtin.deduplication import DeduplicateTasks, normalize_text, word_ngrams, words
from rollmill.errors import ConfigError, TasksetError
from rollmill.types import Task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(rows: list[dict[str, Any]], *pipeline: Any, **keys: Any) -> Taskset:
    """A taskset of these rows after the pipeline; called in a folder of its own."""
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_taskset(TasksetConfig.model_validate({"path": "t.jsonl", "pipeline": list(pipeline), **keys}))


def prompts(taskset: Taskset) -> list[Any]:
    return [task.prompt for task in taskset.tasks]


def rows_of(*texts: str, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": text, **columns} for text in texts]


# -- clean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, "cafe\u0301", "caf\u00e9"),
        ({}, "x\u00b2", "x\u00b2"),
        ({"unicode": "NFKC"}, "x\u00b2 \uff11", "x2 1"),
        ({}, "\ufeffone\u200b two\u0007", "one two"),
        ({"control": False}, "one\u200b two", "one\u200b two"),
        ({}, "\u0915\u094d\u200d\u0937", "\u0915\u094d\u200d\u0937"),  # a joiner that the script needs
        ({}, "a  b \r\n\tc\u00a0d\t \n", "a  b\n\tc d\n"),
        ({"whitespace": "all"}, "  a \t b\n\n\n\n  c \n", "a b\n\nc"),
        ({"whitespace": None}, "a \r\n", "a \r\n"),
        ({"html": True}, "1 &lt; 2 &amp;amp; 3", "1 < 2 &amp; 3"),
        ({}, "1 &lt; 2", "1 &lt; 2"),
    ],
)
def test_clean(options: dict[str, Any], before: str, after: str, folder: Path) -> None:
    taskset = loaded([{"prompt": before, "answer": before, "response": before}], {"name": "clean", **options})
    [task] = taskset.tasks
    assert (task.prompt, task.answer, task.response) == (after, after, after)


def test_clean_says_what_it_changed(folder: Path) -> None:
    rows = [
        {"prompt": "a \u200b", "answer": ["b "]},
        {"prompt": [{"role": "user", "content": "hi "}]},
        {"prompt": "fine", "answer": "fine "},
        {"prompt": "\u200b"},
    ]
    taskset = loaded(rows, {"name": "clean", "fields": ["prompt"]})
    assert prompts(taskset) == ["a", [{"role": "user", "content": "hi"}], "fine"]
    assert (taskset.tasks[0].answer, taskset.tasks[2].answer) == (["b "], "fine ")
    [report] = taskset.reports
    assert str(report) == (
        "taskset t: clean: 3 of 4 tasks kept, 2 changed (whitespace 2, control characters 1), 1 dropped "
        "(empty prompt 1)"
    )
    assert [str(row) for row in taskset.rejected] == ["task t:3: clean: empty prompt"]


@given(st.text())
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    from rollmill.data.operators.builtin.clean import CleanTasks
    from rollmill.data.operators.pipeline import run_task_pipeline

    for options in (CleanTasks(), CleanTasks(unicode="NFKC", whitespace="all")):
        tasks = [Task("a", "p", response=text)]
        once, _ = run_task_pipeline("t", tasks, [options], list)  # type: ignore[arg-type]
        twice, [report] = run_task_pipeline("t", once, [options], list)  # type: ignore[arg-type]
        assert twice[0].response == once[0].response
        assert not report.changed
        assert tasks[0].response == text, "what was read stays as it is"


# -- filter --------------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "short", "answer": "1", "level": 1, "tags": ["a"]},
    {"prompt": "rather long", "answer": "", "level": "3", "tags": []},
    {"prompt": "very, very long", "answer": "x7", "level": 5, "tags": ["b", "c"]},
    {"prompt": "no level"},
]


@pytest.mark.parametrize(
    ("options", "kept", "reasons"),
    [
        ({"field": "level", "at_least": 3}, [1, 2], {"level too small": 1, "level missing": 1}),
        ({"field": "level", "at_most": 3}, [0, 1], {"level too great": 1, "level missing": 1}),
        ({"field": "answer", "at_least": 0}, [0], {"answer missing": 2, "answer no number": 1}),
        ({"field": "prompt", "min_length": 6, "max_length": 11}, [1, 3], {"prompt too short": 1, "prompt too long": 1}),
        ({"field": "tags", "min_length": 1}, [0, 2], {"tags too short": 2}),
        ({"field": "level", "values": [1, 3]}, [0, 1], {"level another value": 2}),
        ({"field": "answer", "matches": r"^x?\d+$"}, [0, 2], {"answer no match": 2}),
        ({"field": "answer", "present": True}, [0, 2], {"answer missing": 2}),
        ({"field": "answer", "present": False}, [1, 3], {"answer present": 2}),
        ({"field": "level", "at_least": 2, "exclude": True}, [0, 3], {"excluded by level": 2}),
        ({"field": "id", "values": ["t:2"]}, [2], {"id another value": 3}),
    ],
)
def test_filter(options: dict[str, Any], kept: list[int], reasons: dict[str, int], folder: Path) -> None:
    taskset = loaded(ROWS, {"name": "filter", **options})
    assert [task.id for task in taskset.tasks] == [f"t:{number}" for number in kept]
    [report] = taskset.reports
    dropped = list(report.dropped.values())
    assert {why: dropped.count(why) for why in dropped} == reasons
    assert report.kept == len(kept)


def test_a_filter_on_a_column_that_nobody_has_is_an_error(folder: Path) -> None:
    message = r"operator `filter`: no task has a column lvl \(columns: level, tags\); correct `field`"
    with pytest.raises(TasksetError, match=message):
        loaded(ROWS, {"name": "filter", "field": "lvl", "at_least": 1})


# -- duplicates and contamination ----------------------------------------------------------------------------------


def test_duplicates_are_the_same_but_for_case_spaces_and_form(folder: Path) -> None:
    rows = [
        {"prompt": "What is 2+2?", "answer": "4"},
        {"prompt": " what  IS 2+2?\n", "answer": "4"},
        {"prompt": "What is \uff12+2?", "answer": "5"},
        {"prompt": "What is 2-2?", "answer": "0"},
    ]
    taskset = loaded(rows, "deduplicate")
    assert [task.id for task in taskset.tasks] == ["t:0", "t:3"]
    assert "2 dropped (duplicate 1, same prompt, other answer 1)" in str(taskset.reports[0])
    assert [task.id for task in loaded(rows, {"name": "deduplicate", "conflicting": "drop"}).tasks] == ["t:3"]


STORY = "Anna has seven red apples and gives three of them to her brother Tom before lunch, how many are left for her"


def test_near_duplicates_share_most_of_their_words(folder: Path) -> None:
    pytest.importorskip("datasketch")
    rows = rows_of(
        STORY, STORY.replace("red", "green"), "Something else altogether, with other words in it", STORY + "?"
    )
    operator = {"name": "deduplicate", "by": "near"}
    assert [task.id for task in loaded(rows, {**operator, "threshold": 0.9}).tasks] == ["t:0", "t:1", "t:2"]
    assert [task.id for task in loaded(rows, {**operator, "threshold": 0.6}).tasks] == ["t:0", "t:2"]


def test_pictures_that_look_the_same_are_duplicates(folder: Path) -> None:
    """Scaled, compressed and in another format; other shapes and other colours are other pictures."""
    image = pytest.importorskip("PIL.Image")
    draw = pytest.importorskip("PIL.ImageDraw")

    def drawn(shape: str, colour: str) -> Any:
        made = image.new("RGB", (120, 80), "white")
        getattr(draw.Draw(made), shape)((20, 10, 80, 60), fill=colour)
        return made

    first = drawn("ellipse", "red")
    first.save("a.png")
    first.save("b.jpg", quality=60)
    first.resize((61, 40)).save("c.png")
    drawn("rectangle", "red").save("d.png")
    drawn("ellipse", "blue").save("e.png")
    first.transpose(image.Transpose.FLIP_LEFT_RIGHT).save("f.png")
    names = ["a.png", "b.jpg", "c.png", "d.png", "e.png", "f.png"]
    rows: list[dict[str, Any]] = [{"prompt": "what?", "images": [name], "answer": "1"} for name in names]
    rows += [{"prompt": "what?", "images": ["a.png", "d.png"]}, {"prompt": "what?", "images": ["c.png", "e.png"]}]
    rows += [{"prompt": "why?", "images": ["a.png"]}, {"prompt": "what?"}, {"prompt": "What?"}]
    every = [f"t:{i}" for i in range(10)]
    assert [task.id for task in loaded(rows, "deduplicate").tasks] == every
    alike = {"name": "deduplicate", "pictures": "alike"}
    kept = [each for each in every if each not in ("t:1", "t:2")]
    assert [task.id for task in loaded(rows, alike).tasks] == kept
    pytest.importorskip("datasketch")
    assert [task.id for task in loaded(rows, alike | {"by": "near"}).tasks] == kept
    with pytest.raises(ValueError, match="picture_distance is honoured with pictures: alike"):
        DeduplicateTasks(name="deduplicate", picture_distance=3)


def test_words_are_signs_numbers_and_characters() -> None:
    assert words(normalize_text("Add 12+7, 全部の和!")) == ["add", "12", "+", "7", ",", "全", "部", "の", "和", "!"]
    assert list(word_ngrams(["a", "b", "c"], 2)) == ["a b", "b c"]
    assert list(word_ngrams(["a"], 2)) == ["a"]


def test_tasks_that_overlap_with_held_out_ones_are_dropped(folder: Path) -> None:
    held = rows_of(STORY, "2+2 = ?", *(f"Answer this riddle in one word: {name}" for name in "abcdef"))
    Path("held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    rows = rows_of(
        "Once more: " + STORY,
        "2 + 2 = ?",
        "2+2 = 5?",
        "Answer this riddle in one word: z",  # the template of the held-out prompts
        "Anna has seven red apples",
    )
    taskset = loaded(rows, {"name": "decontaminate", "ngram": 6, "against": [{"path": "held.jsonl"}]})
    assert [task.id for task in taskset.tasks] == ["t:2", "t:3", "t:4"]
    assert taskset.reports[0].dropped == {"t:0": "6 words of a held-out prompt", "t:1": "held out"}


def test_the_same_question_about_another_picture_is_not_held_out(folder: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    for name, colour in (("held", "red"), ("mine", "blue")):
        pil.new("RGB", (4, 4), colour).save(folder / f"{name}.png")
    held = [{"prompt": STORY, "images": ["held.png"]}]
    Path("held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    rows = [
        {"prompt": text, "images": [f"{name}.png"]} for text in (STORY, "So: " + STORY) for name in ("mine", "held")
    ]
    taskset = loaded(rows, {"name": "decontaminate", "ngram": 6, "against": [{"path": "held.jsonl"}]})
    assert [task.id for task in taskset.tasks] == ["t:0", "t:2"]
    assert taskset.reports[0].dropped == {"t:1": "held out", "t:3": "6 words of a held-out prompt"}


def run_file(folder: Path, pipeline: list[Any], evaluation: dict[str, Any] | None) -> Path:
    for name in ("t", "held"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(STORY, f"{name}?")))
    run: dict[str, Any] = {"model": {"new": {}}, "rewards": [{"name": "math"}]}
    run["taskset"] = {"path": "t.jsonl", "pipeline": pipeline}
    if evaluation is not None:
        run["evaluation"] = {"taskset": evaluation}
    (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    return folder / "run.yaml"


def test_held_out_tasks_are_those_of_the_evaluation(folder: Path) -> None:
    run = load_run(run_file(folder, ["decontaminate"], {"path": "held.jsonl", "pipeline": ["clean"]}))
    assert [task.prompt for task in load_taskset(run.stages[0].taskset).tasks] == ["t?"]
    (folder / "again.yaml").write_text(run.to_yaml())
    assert load_run(folder / "again.yaml").stages == run.stages


@pytest.mark.parametrize(
    ("pipeline", "evaluation", "message"),
    [
        (["decontaminate"], None, "taskset.pipeline.0: what is held out? Give `against`, or an evaluation"),
        (
            [],
            {"path": "held.jsonl", "pipeline": ["decontaminate"]},
            "evaluation.taskset.pipeline.0: held-out tasks would be compared with nothing; put it into taskset.pip",
        ),
        (
            [{"name": "decontaminate", "against": [{"path": "gone.jsonl"}]}],
            None,
            "taskset.pipeline.0.against.0.path: gone.jsonl does not exist",
        ),
        ([{"name": "difficulty", "scores": "no.jsonl"}], None, "taskset.pipeline.0.scores: no.jsonl does not exist"),
        (
            [{"name": "filter", "field": "x"}],
            None,
            "taskset.pipeline.0: give a condition: one of at_least, at_most, min_",
        ),
        ([{"name": "filter", "field": "x", "matches": "("}], None, "matches: not a regular expression: missing )"),
        ([{"name": "filter", "at_least": 1}], None, "taskset.pipeline.0.field: is required"),
        ([{"name": "deduplicate", "ngram": 4}], None, "ngram is honoured with by: near; set it or remove ngram"),
        ([{"name": "difficulty", "range": [1, 1]}], None, "range: both ends are 1; give two numbers"),
        (
            [{"name": "sample", "n": 3, "ngram": 4}],
            None,
            "`ngram` is honoured by operator `deduplicate` and `decontamin",
        ),
        (
            ["sort"],
            None,
            "taskset.pipeline.0: sampler `shuffled` takes no notice of how the tasks are sorted; give sampler: s",
        ),
        (["dedupe"], None, "taskset.pipeline.0.name: `dedupe` is not known; did you mean `deduplicate`?"),
        ([{"n": 3}], None, "taskset.pipeline.0.name: is required"),
    ],
)
def test_wrong_pipelines(pipeline: list[Any], evaluation: Any, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(run_file(folder, pipeline, evaluation))
    assert message in str(error.value)


# -- difficulty, sort, sample --------------------------------------------------------------------------------------


def difficulties(taskset: Taskset) -> list[Any]:
    return [task.metadata["difficulty"] for task in taskset.tasks]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"column": "level", "missing": 9}, [1.0, 3.0, 5.0, 9.0]),
        ({"column": "level", "range": [1, 5], "missing": 0.5}, [0.0, 0.5, 1.0, 0.5]),
        ({"column": "level", "range": [4, 2], "missing": 0}, [1.0, 0.5, 0.0, 0.0]),
        ({"column": "prompt_kind", "values": {"easy": 0.2, "7": 0.9}, "missing": 0.0}, [0.2, 0.9, 0.0, 0.0]),
    ],
)
def test_difficulty_from_a_column(options: dict[str, Any], expected: list[float], folder: Path) -> None:
    rows = [{**row, "prompt_kind": kind} for row, kind in zip(ROWS, ["easy", 7, None, "?"], strict=True)]
    taskset = loaded(rows, {"name": "difficulty", **options})
    assert difficulties(taskset) == expected
    assert "4 changed" in str(taskset.reports[0])


def test_difficulty_from_scores(folder: Path) -> None:
    scores = [{"id": f"t:{number}", "difficulty": number / 4} for number in (3, 1, 0, 2)]
    Path("scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    assert difficulties(loaded(ROWS, {"name": "difficulty", "scores": "scores.jsonl"})) == [0, 0.25, 0.5, 0.75]
    Path("scores.jsonl").write_text('{"id": "t:1", "difficulty": 1}\n')
    message = (
        r"`difficulty`: 3 of 4 tasks have no number in scores.jsonl \(first: task t:0 has None\); correct them, tr"
    )
    with pytest.raises(TasksetError, match=message):
        loaded(ROWS, {"name": "difficulty", "scores": "scores.jsonl"})
    Path("scores.jsonl").write_text('{"id": "t:1"}\n')
    with pytest.raises(
        TasksetError, match=r"scores.jsonl:1: expected an id and a difficulty, found .* `rollmill tasks sc"
    ):
        loaded(ROWS, {"name": "difficulty", "scores": "scores.jsonl"})


def test_sort_is_stable_and_needs_numbers(folder: Path) -> None:
    rows = [{"prompt": f"{level}{letter}", "level": level} for letter in "ab" for level in (3, 1, 2)]
    assert prompts(loaded(rows, {"name": "sort", "column": "level"})) == ["1a", "1b", "2a", "2b", "3a", "3b"]
    descending = loaded(rows, {"name": "sort", "column": "level", "descending": True})
    assert prompts(descending) == ["3a", "3b", "2a", "2b", "1a", "1b"]
    with pytest.raises(
        TasksetError, match=r"operator `sort`: 6 of 6 tasks have no number in the column difficulty \(fi"
    ):
        loaded(rows, "sort")


def test_a_sample_is_the_same_every_time(folder: Path) -> None:
    rows = rows_of(*map(str, range(50)))
    one, again = loaded(rows, {"name": "sample", "n": 9}), loaded(rows, {"name": "sample", "n": 9})
    assert prompts(one) == prompts(again)
    assert [int(prompt) for prompt in prompts(one)] == sorted(int(prompt) for prompt in prompts(one))
    assert len(one.tasks) == 9
    assert prompts(one) != prompts(loaded(rows, {"name": "sample", "n": 9, "seed": 1}))
    assert len(loaded(rows, {"name": "sample", "n": 99}).tasks) == 50
    assert one.fingerprint() == again.fingerprint() != loaded(rows).fingerprint()


# -- users' operators, and pipelines as a whole --------------------------------------------------------------------


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_registered", {})

    @rollmill.task_operator
    def shout(batch: TaskBatch, *, mark: str = "!") -> None:
        """Ends prompts with a mark."""
        for task in batch.tasks:
            if task.prompt == "quiet":
                batch.drop(task, "quiet")
            else:
                task.prompt = f"{task.prompt}{mark}"
                batch.change(task, "shouted")

    @rollmill.task_operator
    def backwards(batch: TaskBatch) -> None:
        """Loses a task."""
        batch.arrange(batch.tasks[::-1][1:])

    @rollmill.task_operator
    def renames(batch: TaskBatch) -> None:
        """Gives a task the id of another."""
        batch.tasks[0].id = batch.tasks[-1].id

    @rollmill.task_operator
    def drops_twice(batch: TaskBatch) -> None:
        """Drops a task that is gone."""
        for task in [*batch.tasks, *batch.tasks]:
            batch.drop(task, "no good")


def test_a_users_operator(users: None, folder: Path) -> None:
    taskset = loaded(rows_of("a", "quiet", "b"), {"name": "shout", "mark": "?!"}, "deduplicate")
    assert prompts(taskset) == ["a?!", "b?!"]
    assert [str(report) for report in taskset.reports] == [
        "taskset t: shout: 2 of 3 tasks kept, 2 changed (shouted 2), 1 dropped (quiet 1)",
        "taskset t: deduplicate: 2 of 2 tasks kept",
    ]


def test_what_a_users_operator_does_wrong_is_named(users: None, folder: Path) -> None:
    with pytest.raises(TasksetError, match="taskset t: operator `backwards` raised ValueError: arrange needs the same"):
        loaded(rows_of("a", "b"), "backwards")
    with pytest.raises(TasksetError, match="operator `renames` raised ValueError: it changed the id of a task"):
        loaded(rows_of("a", "b"), "renames")
    with pytest.raises(
        TasksetError, match=r"operator `drops_twice` raised .*: task t:0 cannot be dropped: it is not in the batch"
    ):
        loaded(rows_of("a", "b"), "drops_twice")
    run = run_file(folder, [{"name": "shout", "marc": "x"}], None)
    with pytest.raises(ConfigError, match=r"taskset.pipeline.0.marc: unknown key; did you mean `mark`\?"):
        load_run(run)
    with pytest.raises(ConfigError, match=r"`shouts` is not known; did you mean `shout`\?"):
        load_run(run_file(folder, ["shouts"], None))


def test_a_pipeline_that_leaves_nothing_says_what_each_operator_did(folder: Path) -> None:
    message = (
        "taskset t: its pipeline leaves no task; loosen an operator\n"
        "  taskset t: deduplicate: 1 of 2 tasks kept, 1 dropped (duplicate 1)\n"
        "  taskset t: filter: 0 of 1 tasks kept, 1 dropped (prompt too short 1)"
    )
    with pytest.raises(TasksetError) as error:
        loaded(rows_of("a", "a"), "deduplicate", {"name": "filter", "field": "prompt", "min_length": 2})
    assert str(error.value) == message


@pytest.mark.slow
def test_gsm8k_overlaps_with_its_test_set_in_five_places(data_dir: Path) -> None:
    source = data_dir / "gsm8k"
    if not source.is_dir():
        pytest.skip(f"no GSM8K at {source}")
    against = {"path": source / "test.jsonl", "preset": "gsm8k"}
    pipeline = ["clean", "deduplicate", {"name": "decontaminate", "against": [against]}]
    config = {"path": source / "train.jsonl", "preset": "gsm8k", "pipeline": pipeline}
    taskset = load_taskset(TasksetConfig.model_validate(config))
    assert [report.kept for report in taskset.reports] == [7473, 7473, 7468]
    assert len(taskset.reports[0].changed) == 6
    assert {row.reason for row in taskset.rejected} == {"decontaminate: 13 words of a held-out prompt"}
