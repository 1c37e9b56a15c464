"""Every algorithm through the whole loop: rollouts, rewards, demonstrations or pairs, updates, checkpoint, resume."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import outcome, tiny_run
from transformers import AutoTokenizer

from rollmill.cli import main
from rollmill.config.algorithms import known_algorithms
from rollmill.errors import TasksetError
from rollmill.launch import resume, run
from rollmill.quickstart.addition import rows as addition_rows
from rollmill.trackers import load_experiences, read_metrics
from rollmill.trackers.run_views import PlainView
from rollmill.trainer import Trainer

FAST = {
    "grpo",
    "remax",
    "ppo",
    "kimi",
    "gdpo",
    "chord",
    "dpo",
    "kto",
    "self_distill",
}  # each with state or data of its own; the others are slow
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in known_algorithms()
    if name not in ("distill", "jsd", "reward_model")  # these need a second model
]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(5) for b in range(5)]
LABELLED = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if n % 2 else "rejected"], "label": n % 2 == 1}
    for n, pair in enumerate(PAIRS)
]
EXTRA: dict[str, dict[str, Any]] = {
    "kimi": {"trainer": {"updates_per_batch": 2}},
    "ppo": {"algorithm": {"kl": {"coefficient": 0.1, "estimator": "k1", "where": "reward", "target": 0.01}}},
    "grpo": {"algorithm": {"kl": {"coefficient": 0.1, "refresh_every": 2}, "corrections": ["tis"]}, "max_staleness": 1},
    "dapo": {"algorithm": {"overlong_buffer": 4}},
    "pass_at_k": {"algorithm": {"advantage": {"k": 2}}},
    "self_distill": {"algorithm": {"template": "{context} {prompt}", "weights": "ema"}},
}


def start(folder: Path, name: str, steps: int, **changes: Any) -> dict[str, Any]:
    """A run of the algorithm and nothing else."""
    own = dict(EXTRA.get(name, {}))
    own["algorithm"] = {"name": name, **own.get("algorithm", {})}
    own["trainer"] = {"lr": 1e-3, **own.get("trainer", {})}
    if not known_algorithms()[name].uses_rollouts:
        own |= {"rollout": None, "rewards": None}
    if known_algorithms()[name].uses_labels:
        (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LABELLED))
        own["taskset"] = {"path": str(folder / "labels.jsonl"), "function": None, "options": None}
    if known_algorithms()[name].uses_pairs:
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
        own["taskset"] = {"path": str(folder / "pairs.jsonl"), "function": None, "options": None}
    path = tiny_run(folder, stages=None, evaluation=None, steps=steps, **(own | changes))
    return run(path, out=folder / f"out-{steps}", view=PlainView(io.StringIO()))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_makes_its_steps_and_resumes_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = start(tmp_path, name, 4)
    assert summary["status"] == "done"
    whole = outcome(tmp_path / "out-4")
    rows = read_metrics(tmp_path / "out-4")
    assert len(rows) == 4
    assert any(row["grad_norm"] > 0 for row in rows)
    cut = tmp_path / "out-cut"
    (tmp_path / "out-4").rename(cut)
    for folder in (cut / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 2:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    assert resume(cut, view=PlainView(io.StringIO()))["status"] == "done"
    assert outcome(cut) == whole


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dpo", "4 tasks loaded, 2 left out: 1 empty response, 1 empty rejected"),
        ("mix", "6 tasks loaded, 0 left out; 5 of them to imitate, 1 left out: 1 empty response"),
    ],
)
def test_rows_without_a_solution_are_counted(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*PAIRS[:4], PAIRS[4] | {"chosen": ""}, PAIRS[5] | {"rejected": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"answer": "1"}) + "\n" for row in rows))
    taskset = {"path": str(tmp_path / "rows.jsonl"), "function": None, "options": None}
    own: dict[str, Any] = {"algorithm": {"name": name}}
    own |= {"rollout": None, "rewards": None} if name == "dpo" else {}
    path = tiny_run(tmp_path, stages=None, evaluation=None, steps=1, taskset=taskset, **own)
    shown = io.StringIO()
    run(path, out=tmp_path / "out", view=PlainView(shown))
    assert f", 1 steps, {line}\n" in shown.getvalue()
    assert main(["check", str(path)]) == 0
    checked = " ".join(capsys.readouterr().out.split())
    assert line.replace(" loaded, ", " (") + ") from" in checked
    assert main(["check", "--json", str(path)]) == 0
    [found] = json.loads(capsys.readouterr().out)["tasks"]
    found = found.get("examples", found)
    assert (found["tasks"], found["rejected"]) == ((4, 2) if name == "dpo" else (5, 1))
    assert found["left_out"]["empty response"] == 1


@pytest.mark.parametrize("name", ["sft", "dpo", "self_distill"])
def test_check_refuses_a_taskset_without_a_solution(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "response": "", "rejected": "2"}))
    taskset = {"path": str(tmp_path / "rows.jsonl"), "function": None, "options": None}
    own: dict[str, Any] = {} if name == "self_distill" else {"rollout": None}
    path = tiny_run(
        tmp_path, stages=None, evaluation=None, steps=1, taskset=taskset, algorithm={"name": name}, rewards=None, **own
    )
    with pytest.raises(TasksetError) as refused:
        run(path, out=tmp_path / "out", view=PlainView(io.StringIO()))
    assert main(["check", str(path)]) == 2
    assert str(refused.value) in capsys.readouterr().err


def test_remax_rolls_one_greedy_completion_per_task(tmp_path: Path) -> None:
    start(tmp_path, "remax", 1, rollout={"batch": 3, "group_size": 2})
    step = list(load_experiences(tmp_path / "out-1"))
    groups: dict[str, set[float]] = {}
    for experience in step:
        groups.setdefault(experience.group, set()).add(experience.greedy_reward)
    assert len(step) == 6
    assert all(len(baselines) == 1 for baselines in groups.values())


def test_kto_learns_from_labelled_rows_and_from_pairs(tmp_path: Path) -> None:
    """A row with both solutions is two completions; all of them are seen once per epoch, each on its own."""
    rows = [*LABELLED[:6], *PAIRS[6:8]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {"path": str(tmp_path / "rows.jsonl"), "function": None, "options": None}
    start(tmp_path, "kto", 1, taskset=taskset, algorithm={"name": "kto", "batch": 10})
    step = list(load_experiences(tmp_path / "out-1"))
    assert len(step) == len({each.group for each in step}) == 10
    worth = {(each.prompt, each.response): each.reward for each in step}
    expected = {(row["prompt"], row["completion"]): float(row["label"]) for row in LABELLED[:6]}
    for pair in PAIRS[6:8]:
        expected |= {(pair["prompt"], pair["chosen"]): 1.0, (pair["prompt"], pair["rejected"]): 0.0}
    assert worth == expected
    (row,) = read_metrics(tmp_path / "out-1")
    assert row["labels/baseline"] == 0  # of a policy that is its reference
    assert row["loss"] == pytest.approx(0.5)


@pytest.mark.parametrize(("desirable", "word"), [(5, "stand in a ratio of 0.25"), (0, "no completion is desirable")])
def test_kto_notes_kinds_that_do_not_weigh_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, desirable: int, word: str
) -> None:
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1), "label": n < desirable} for n in range(25)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    view = io.StringIO()
    path = tiny_run(
        tmp_path,
        stages=None,
        evaluation=None,
        steps=1,
        rewards=None,
        rollout=None,
        algorithm={"name": "kto"},
        taskset={"path": str(tmp_path / "rows.jsonl"), "function": None, "options": None},
    )
    run(path, out=tmp_path / "out", view=PlainView(view))
    assert word in view.getvalue() + caplog.text


def test_kto_asks_for_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    taskset = {"path": str(tmp_path / "rows.jsonl"), "function": None, "options": None}
    path = tiny_run(
        tmp_path, stages=None, evaluation=None, rewards=None, rollout=None, algorithm={"name": "kto"}, taskset=taskset
    )
    with pytest.raises(TasksetError, match=r"rows with prompt, completion and label \(true or false\)"):
        run(path, out=tmp_path / "out", view=PlainView(io.StringIO()))


SELF: dict[str, Any] = {"name": "self_distill", "template": "{context} {prompt}"}


@pytest.mark.parametrize("context", ["solution", "answer", "success"])
def test_the_teacher_sees_what_the_policy_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    """The prompts that the trainer gets are those of the task with the context in them."""
    seen: list[Any] = []
    original = Trainer.step

    def step(self: Trainer, experiences: Any, version: int, *probes: Any) -> Any:
        seen.extend(experiences)
        return original(self, experiences, version, *probes)

    monkeypatch.setattr(Trainer, "step", step)
    keys = {"success_at_least": 0.0} if context == "success" else {}
    rollout = {"batch": 3, "group_size": 3, "max_new_tokens": 12}
    rewards = [{"name": "format", "pattern": ".*[0-4]"}]
    start(tmp_path, "self_distill", 2, algorithm={**SELF, "context": context, **keys}, rollout=rollout, rewards=rewards)
    rows, tokenizer = (
        read_metrics(tmp_path / "out-2"),
        AutoTokenizer.from_pretrained(tmp_path / "out-2/checkpoints/step-000002"),
    )
    assert all(row["loss/distill"] > 0 and row["teacher/context"] == 1 for row in rows)
    tasks = {row["prompt"]: row for row in addition_rows(300, 1, digits=2)}
    for each in seen:
        task = tasks[each.prompt]
        group = [other for other in seen if other.group == each.group]
        known = {"solution": {task["response"]}, "answer": {str(task["answer"])}}
        known["success"] = {other.response for other in group if other is not each}
        shown = tokenizer.decode(each.teacher_prompt.tolist())
        assert shown in {f"{text} {each.prompt}" for text in known[context]}


def test_a_group_without_success_teaches_nothing(tmp_path: Path) -> None:
    rewards = [{"name": "format", "pattern": "never"}]
    start(tmp_path, "self_distill", 1, algorithm={**SELF, "context": "success"}, rewards=rewards)
    (row,) = read_metrics(tmp_path / "out-1")
    assert (row["teacher/context"], row["skipped"]) == (0, 1)


def test_tasks_without_a_solution_are_named_or_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1, **({"response": str(n + 1)} if n else {})} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset: dict[str, Any] = {"path": str(tmp_path / "rows.jsonl"), "function": None, "options": None}
    with pytest.raises(TasksetError, match="1 of 8 tasks have no response, which algorithm self_distill") as error:
        start(tmp_path, "self_distill", 1, algorithm=SELF, taskset=taskset)
    assert "taskset.fields.response" in str(error.value)
    assert "task rows:0" in str(error.value)
    done = start(tmp_path, "self_distill", 2, algorithm=SELF, taskset=taskset | {"on_bad_row": "skip"})
    assert done["status"] == "done"
