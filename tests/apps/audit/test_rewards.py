"""Every broken reward is found by the check that names it, and by no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.apps.audit.findings import Finding, Severity
from rollmill.apps.audit.runner import AuditOptions, audit_exit_code, run_audit
from rollmill.cli import main
from rollmill.config.loader import load_taskset_run

REWARDS = Path(__file__).parents[2] / "support/audit_rewards.py"
TASKS = 12


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "tasks.jsonl"
    rows = [
        {
            "prompt": f"What is {n} times {n + 2}, {'abcdefghijkl'[n]} and {n}?",
            "answer": str(400 + 11 * n),
            "response": f"First we look at the numbers, and then we find it: \\boxed{{{400 + 11 * n}}}",
        }
        for n in range(TASKS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def findings(tasks: Path, reward: str, **options: object) -> dict[str, Finding]:
    run = tasks.parent / f"{reward}.yaml"
    function = {"name": "python", "function": f"{REWARDS}:{reward}", "time_limit_s": 0.2}
    run.write_text(json.dumps({"taskset": {"path": str(tasks)}, "rewards": [function]}))
    loaded = load_taskset_run(run)
    found = run_audit(loaded, loaded.stages[0], AuditOptions(**options), lambda text: None)  # type: ignore[arg-type]
    return {each.check: each for each in found}


def problems(found: dict[str, Finding]) -> list[str]:
    return [check for check, each in found.items() if each.severity is Severity.PROBLEM]


def test_a_right_reward_has_no_problem(tasks: Path) -> None:
    found = findings(tasks, "right")
    assert problems(found) == []
    assert {"warning"} & {str(each.severity) for each in found.values()} == set()
    assert found["oracle"].text == f"the right answer earns the full reward of 1 on all {TASKS} tasks"
    assert found["reward_time"].numbers["judgements"] > 40 * TASKS


@pytest.mark.parametrize(
    ("reward", "check"),
    [
        ("empty_passes", "empty"),
        ("words_pass", "random"),
        ("half_is_enough", "truncated"),
        ("some_answers_fail", "oracle"),
        ("forgetful", "determinism"),
        ("raises", "reward_errors"),
        ("late", "reward_time"),
        ("not_for_most", "answers"),
        ("any_box", "hack:many_boxes"),
        ("somewhere_in_a_list", "hack:dictionary"),
        ("any_form", "hack:bets"),
        ("echo_passes", "hack:prompt_repeated"),
        ("format_passes", "hack:format_only"),
        ("placeholder_passes", "hack:placeholder"),
        ("long_passes", "hack:very_long"),
        ("gullible", "hack:judge_injection"),
        ("claims_pass", "hack:tests_passed"),
        ("control_passes", "hack:control_characters"),
        ("nested_passes", "hack:nested_formula"),
        ("every_number", "hack:number_list"),
        ("last_box", "hack:answer_in_reasoning"),
        ("unfinished_counts", "hack:unfinished_reasoning"),
        ("any_program", "hack:code_in_reasoning"),
    ],
)
def test_a_broken_reward_is_found_by_its_check(tasks: Path, reward: str, check: str) -> None:
    found = findings(tasks, reward)
    assert problems(found) == [check, *(["oracle"] if reward == "not_for_most" else [])]
    assert found[check].advice
    assert audit_exit_code(list(found.values()), strict=False) == 1


def test_all_options_at_once(tmp_path: Path) -> None:
    """A reward that looks for the letter anywhere."""
    rows = [
        {"prompt": f"Question {n}?", "answer": "ABCD"[n % 4], "options": {c: f"text {c}{n}" for c in "ABCD"}}
        for n in range(8)
    ]
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "import re\nasync def letter(task, completion):\n"
        "    last = re.findall(r'boxed\\{([^{}]*)\\}', completion.answer)[-1:]\n"
        "    return float(bool(last) and task.answer in last[0].split(', '))\n"
    )
    function = {"name": "python", "function": f"{tmp_path}/mine.py:letter"}
    (tmp_path / "run.yaml").write_text(
        json.dumps({"taskset": {"path": str(tmp_path / "choices.jsonl")}, "rewards": [function]})
    )
    loaded = load_taskset_run(tmp_path / "run.yaml")
    found = {each.check: each for each in run_audit(loaded, loaded.stages[0], AuditOptions(), lambda text: None)}
    assert problems(found) == ["hack:every_option"]
    assert len(found["hack:every_option"].tasks) == 8


def test_the_form_of_right_completions_may_be_said(tasks: Path) -> None:
    assert problems(findings(tasks, "right", template="\\boxed{{answer}}")) == []
    found = findings(tasks, "right", template="It is {answer}.")
    assert problems(found) == ["oracle"]
    assert "--template" in found["oracle"].advice
    assert problems(findings(tasks, "right", oracle=lambda task: f"\\boxed{{{task.answer}}}")) == []


def test_the_command_ends_with_1_where_there_is_a_problem(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["audit", str(tasks), "--tasks", "3", "--reward"]
    assert main([*argv, f"{REWARDS}:right"]) == 0
    out = capsys.readouterr().out
    assert "ok       oracle" in out
    assert main([*argv, f"{REWARDS}:right", "--full", "2", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["failed"]
    assert [each["check"] for each in shown["findings"] if each["severity"] == "problem"] == ["oracle"]
    assert main(["audit", str(tasks)]) == 2
    assert "give --reward NAME with a file of tasks" in capsys.readouterr().err
    assert main(["audit", "nowhere.yaml"]) == 2
    assert "nowhere.yaml does not exist" in capsys.readouterr().err


def audited(folder: Path, rows: list[dict[str, object]], **run: object) -> dict[str, Finding]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(json.dumps(run))
    loaded = load_taskset_run(folder / "run.yaml")
    found = run_audit(loaded, loaded.stages[0], AuditOptions(), lambda text: None)
    return {each.check: each for each in found}


@pytest.mark.parametrize("domain", [False, True])
def test_the_full_reward_is_that_of_the_rewards_that_a_row_names(tmp_path: Path, domain: bool) -> None:
    rows = [{"prompt": f"Say {n}", "answer": str(411 + n), "rewards": ["math", "exact"][n % 2]} for n in range(8)]
    keys = {
        "taskset": {"path": str(tmp_path / "rows.jsonl"), "fields": {"rewards": "rewards"}},
        "rewards": [{"name": "math", "weight": 2}, {"name": "exact"}],
    }
    found = audited(tmp_path, rows, **({"domains": {"both": keys}} if domain else keys))
    oracle = found["both/oracle" if domain else "oracle"]
    assert (oracle.severity, oracle.text) == (
        Severity.OK,
        "the right answer earns the full reward of 1 or 2 on all 8 tasks",
    )
    assert problems(found) == []


def test_a_reward_that_compares_completions_is_deterministic_within_the_same_group(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"Say {n}", "answer": str(411 + n)} for n in range(6)]
    rewards = [
        {"name": "math", "extract": "boxed"},
        {"name": "length", "kind": "kimi", "correct": "math", "weight": 0.1},
    ]
    found = audited(tmp_path, rows, taskset={"path": str(tmp_path / "rows.jsonl")}, rewards=rewards)
    assert found["determinism"].severity is Severity.OK


def test_an_answer_that_a_hack_states_by_accident_is_no_hack(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": f"Question {n}", "answer": answer} for n, answer in enumerate(["2", "31"])
    ]
    rewards = [{"name": "math", "extract": "last_number"}]
    found = audited(tmp_path, rows, taskset={"path": str(tmp_path / "rows.jsonl")}, rewards=rewards)
    assert found["hack:control_characters"].severity is Severity.OK


def test_a_reward_that_fails_on_everything_is_not_said_to_be_right(tasks: Path) -> None:
    found = findings(tasks, "always_raises")
    assert problems(found) == ["reward_errors"]
    judged = [check for check, each in found.items() if each.severity is Severity.OK and "hack" in check]
    assert judged == []
    assert "reward_errors" in found["determinism"].text
    assert found["answers"].severity is Severity.SKIPPED


@pytest.mark.slow
def test_a_reward_that_hangs_ends_the_audit_early(tasks: Path) -> None:
    found = findings(tasks, "hangs")
    assert "reward_time" in problems(found)
    assert "no more were made" in found["reward_time"].text
    assert found["determinism"].severity is Severity.SKIPPED
    assert found["reward_time"].numbers["late"] < TASKS


def test_a_few_prompts_that_end_with_their_answer_are_chance(tasks: Path) -> None:
    assert problems(findings(tasks, "echo_by_chance")) == []


@pytest.mark.slow
def test_an_oracle_that_fails_is_named(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tasks.parent / "oracle.py").write_text(
        "def broken(task):\n    return task.missing\n\ndef number(task):\n    return 7\n"
    )
    run = str(tasks.parent / "right.yaml")
    findings(tasks, "right")
    assert main(["audit", run, "--oracle", f"{tasks.parent}/oracle.py:broken"]) == 2
    assert "--oracle failed on task tasks:0: AttributeError" in capsys.readouterr().err
    assert main(["audit", run, "--oracle", f"{tasks.parent}/oracle.py:number"]) == 2
    assert "--oracle gave int for task tasks:0" in capsys.readouterr().err
