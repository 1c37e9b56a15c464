"""Runs with domains: each task is rolled out, scored, filtered and learned from as its domain says."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chat_server import Answer, chat_server
from support.domain_runs import FLOWS, WORDS, domains_of, rollouts, rows, run_file
from support.tiny import HELD_OUT, TASKS, outcome

import rollmill
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.errors import ConfigError
from rollmill.launch import resume
from rollmill.rollout.served_model import check_endpoint_support
from rollmill.trackers.run_views import PlainView


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("domains")
    rollmill.run(run_file(folder, domains_of(folder), mixing={"by": "need"}), [], folder / "run")
    return folder / "run"


def test_every_completion_is_made_and_scored_as_its_domain_says(run: Path) -> None:
    trained = rollouts(run)
    parts = {row["task_id"].partition("/")[0]: set(row["reward_parts"]) for row in trained}
    assert parts == {"add": {"exact"}, "words": {"format", "repetition"}}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in trained:
        groups.setdefault(row["group"], []).append(row)
    sizes = {name: {len(each) for each in groups.values() if each[0]["task_id"].startswith(name)} for name in parts}
    assert sizes["add"] == {4}
    assert max(sizes["words"]) <= 3  # the domain's pipeline may have dropped long ones
    temperatures = {(row["task_id"].partition("/")[0], row["temperature"]) for row in trained}
    assert temperatures == {("add", 1.0), ("words", 0.8)}
    metrics = rows(run, "metrics.jsonl")
    assert {"domain/add/reward", "domain/words/reward", "domain/words/informative"} <= set().union(*metrics)
    assert any("pipeline/words/length_filter/dropped" in row for row in metrics)
    assert any("loss/words/policy" in row for row in metrics)
    assert any("eval/add/greedy" in row for row in metrics)


def test_a_domain_has_a_workflow_of_its_own(tmp_path: Path) -> None:
    code = """
import rollmill


@rollmill.workflow
async def thrice(task, policy):
    replies = [await policy.complete(task.prompt, max_new_tokens=2) for _ in range(3)]
    return float(sum(len(reply.text) for reply in replies))
"""
    (tmp_path / "flow.py").write_text(code)
    words = {"workflow": "thrice", "rewards": None, "pipeline": None}
    path = run_file(tmp_path, domains_of(tmp_path, **words), plugins=["flow.py"], evaluation=None, steps=2)
    rollmill.run(path, [], tmp_path / "run")
    calls: dict[tuple[str, str], int] = {}
    for row in rollouts(tmp_path / "run"):
        key = row["task_id"].partition("/")[0], row["group"]
        calls[key] = calls.get(key, 0) + 1
    assert {name: count for (name, _), count in calls.items()} == {"add": 4, "words": 9}  # 3 rollouts of 3 calls


def test_shares_of_the_domains(run: Path) -> None:
    last = rows(run, "metrics.jsonl")[-1]
    assert last["tasks/add/share"] + last["tasks/words/share"] == pytest.approx(1)


def test_status_and_report_show_the_domains(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["status", str(run), "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["domains"]}
    metrics = rows(run, "metrics.jsonl")
    last = next(row for row in reversed(metrics) if "domain/add/reward" in row)
    assert found["add"]["reward"] == last["domain/add/reward"]
    assert found["add"]["accuracy"] == [row["eval/add/greedy"] for row in metrics if "eval/add/greedy" in row][-1]
    assert sum(each["share"] for each in found.values()) == pytest.approx(1)
    assert not any(each["paused"] for each in found.values())
    assert main(["status", str(run)]) == 0
    table = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert ["domain", "reward", "share of the batch", "accuracy", "state"] in table
    assert [(row[0], row[3:]) for row in table if row[0] == "words"] == [("words", ["-", "active"])]
    assert "Reward by domain" in (run / "report.html").read_text()


def test_a_resumed_run_with_domains_repeats_the_first(run: Path, tmp_path: Path) -> None:
    whole, cut = outcome(run), tmp_path / "cut"
    shutil.copytree(run, cut)
    for folder in (cut / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 2:
            shutil.rmtree(folder)
    assert resume(cut, view=PlainView(io.StringIO()))["status"] == "done"
    assert outcome(cut) == whole
    assert "taskset" not in yaml.safe_load((cut / "config.yaml").read_text())  # made from the domains, which are there


def test_a_domain_has_its_share_of_the_replayed_groups_and_a_resumed_run_repeats_it(tmp_path: Path) -> None:
    domains = domains_of(tmp_path, replay_share=0.75, pipeline=None)
    path = run_file(tmp_path, domains, buffer={"store": "memory", "replay": {"groups": 2}}, evaluation=None, steps=4)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    rollmill.run(path, [], whole)
    steps = [row for row in rows(whole, "metrics.jsonl") if "replay/groups" in row]
    found = [(row["domain/words/replayed"], row["domain/add/replayed"]) for row in steps]
    assert found[0] == (0, 0)
    assert set(found[1:]) <= {(1, 1), (2, 0)}, "shares of 2 groups: 1.5, and the rest"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000004")
    assert resume(cut, view=PlainView(io.StringIO()))["status"] == "done"
    assert outcome(cut) == outcome(whole)


@pytest.mark.parametrize(
    ("shares", "replay", "says"),
    [
        ((0.5, None), None, "domains.add.replay_share: not honoured without replay; add buffer.replay"),
        ((0.75, 0.5), {"groups": 2}, "domains.words.replay_share: the shares of add, words add up to 1.25, which is"),
        (
            (0.25, 0.5),
            {"groups": 2},
            "domains.words.replay_share: the shares of add, words add up to 0.75, and no",
        ),
    ],
)
def test_shares_of_replay_that_cannot_be_are_refused(
    tmp_path: Path, shares: tuple[float | None, float | None], replay: dict[str, Any] | None, says: str
) -> None:
    domains = domains_of(tmp_path)
    for domain, share in zip(domains.values(), shares, strict=True):
        domain |= {} if share is None else {"replay_share": share}
    with pytest.raises(ConfigError) as error:
        load_run(run_file(tmp_path, domains, **({} if replay is None else {"buffer": {"replay": replay}})))
    assert says in str(error.value)


def test_a_domain_whose_judge_is_lost_is_paused_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The judge answers the first question; then its server drops every connection."""
    with chat_server([Answer('{"score": 7}'), Answer(drop=True)]) as server:
        judge = {"name": "judge", "endpoint": server.url, "model": "m", "try_s": 2, "deadline_s": 3, "tries": 1}
        words = {"rewards": [judge], "pipeline": None}
        mixing = {"lost_after_s": 0.5, "pause_s": 1000}
        path = run_file(tmp_path, domains_of(tmp_path, **words), mixing=mixing, evaluation=None)
        rollmill.run(path, [], tmp_path / "run")
    assert "domain words is paused for 1000 s (pause 1 of 8 in a row)" in caplog.text
    assert "add go on" in caplog.text
    last = rows(tmp_path / "run", "metrics.jsonl")[-1]
    assert last["step"] == 6
    assert last["tasks/words/paused"] == 1
    assert last["domain/add/groups"] == 6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"taskset": TASKS}, "taskset is not honoured beside domains; write it into one of them"),
        ({"mixing": {"least": 0.5}}, "mixing.least: not honoured by `weight`; it is by `need`"),
        ({"rewards": [{"name": "exact"}]}, "rewards: every domain has its own, so this is never used; remove it"),
        ({"algorithm": {"name": "ppo"}}, "domains.words.algorithm: `ppo` trains a critic on all experiences"),
        ({"algorithm": {"name": "sft"}}, "domains.words.algorithm: not honoured: algorithm `sft` of the stage learns"),
        ({"rollout": {"batch": 6, "max_new_tokens": 12, "group_size": 1}}, "rollout.group_size: advantage `grpo`"),
        ({"early_stop": {"metric": "eval/words/greedy", "patience": 1}}, "no evaluation measures `eval/words/greedy`"),
    ],
)
def test_what_domains_cannot_have_is_said(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = run_file(tmp_path, domains_of(tmp_path), **changes)
    with pytest.raises(ConfigError) as error:
        load_run(path)
    assert says in str(error.value)
    assert re.match(r".*run\.yaml(:\d+)?: ", str(error.value))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"rollout": {"group_size": 1}}, "domains.words.rollout.group_size: advantage"),
        ({"workflow": "environment"}, "environment: workflow `environment` acts in one"),
        ({"workflow": {"name": "live_requests"}}, "domains.words.workflow: workflow `live_requests` has no tasks"),
        ({"algorithm": {"name": "grpo", "masks": ["entropy_quantile"]}}, "domains.words.algorithm.masks"),
        ({"rewards": []}, "domains.words.rewards: algorithm"),
        ({"weight": [[5, 1], [2, 1]]}, "rising steps"),
        ({"taskset": {"mix": []}}, "domains.words.taskset.mix: unknown key"),
        ({"evaluation": {"taskset": HELD_OUT, "k": [4]}}, "domains.words.evaluation.k: pass@4 needs"),
    ],
)
def test_what_a_domain_lacks_is_said_where_it_stands(tmp_path: Path, words: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(run_file(tmp_path, domains_of(tmp_path, **words)))
    assert says in str(error.value)


def test_check_prints_the_matrix_of_attainable_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(run_file(tmp_path, domains_of(tmp_path)))]) == 0
    told = capsys.readouterr().out
    matrix = [line.split() for line in told.splitlines() if line.split()[:1] in (["rewards"], ["add"], ["words"])]
    assert ["rewards", "exact", "format", "repetition", "at", "most"] in matrix
    assert ["add", "1", "-", "-", "1"] in matrix
    assert ["words", "-", "1", "0.5", "1"] in matrix


def test_two_rewards_that_decide_the_same_task_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = {"rewards": [{"name": "exact"}, {"name": "math"}]}
    assert main(["check", str(run_file(tmp_path, domains_of(tmp_path, **twice)))]) == 2
    told = capsys.readouterr().err
    assert "the rewards `exact` and `math` both say whether the answer of task `words:0` is right" in told
    said = twice | {"reward_settings": {"verdicts": "several"}}
    assert main(["check", str(run_file(tmp_path, domains_of(tmp_path, **said)))]) == 0


COUNTS = [{"prompt": f"how many {'x' * count}?", "answer": str(count), "judged": "count"} for count in range(1, 4)]
CHOICE = {"prompt": "is it A or B?", "answer": "B", "judged": "exact"}


@pytest.mark.parametrize(
    ("section", "where"), [("taskset", "domains.words.taskset"), ("evaluation", "evaluation.sets.words")]
)
def test_a_choice_question_is_refused_where_its_domain_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, where: str
) -> None:
    """`check` and the run say so before anything is rolled out; it once ended runs after their first evaluation."""
    for name, lines in {"counts": COUNTS, "mixed": [*COUNTS, CHOICE]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    mixed, counts = {"path": "mixed.jsonl"}, {"path": "counts.jsonl"}
    words: dict[str, Any] = {"rewards": ["count"], "pipeline": None, "taskset": counts}
    words |= {"taskset": mixed} if section == "taskset" else {"evaluation": {"taskset": mixed}}
    path = run_file(tmp_path, domains_of(tmp_path, **words))
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{where}: 1 of 4 tasks have an answer that is no number of at least 0 (`mixed:3`: 'B')" in said
    with pytest.raises(ConfigError, match="which the reward `count` cannot compare with"):
        rollmill.run(path, [], tmp_path / "run")
    by_row = {"fields": {"rewards": "judged"}}
    words |= {"rewards": ["count", "exact"], "taskset": words["taskset"] | by_row}
    words |= {"evaluation": {"taskset": mixed | by_row}}
    assert main(["check", str(run_file(tmp_path, domains_of(tmp_path, **words)))]) == 0


def test_a_row_names_its_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["exact", "math"]
    lines = [each | {"judged": kinds[n % 2]} for n, each in enumerate(WORDS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(each) for each in lines))
    taskset = {"path": str(tmp_path / "rows.jsonl"), "fields": {"rewards": "judged"}}
    changes = {"taskset": taskset, "rewards": [{"name": "exact"}, {"name": "math"}], "pipeline": None}
    path = run_file(tmp_path, domains_of(tmp_path, **changes), evaluation=None)
    rollmill.run(path, ["steps=3"], tmp_path / "run")
    parts = {row["task_id"]: set(row["reward_parts"]) for row in rollouts(tmp_path / "run")}
    of_words = {id: names for id, names in parts.items() if id.startswith("words/")}
    assert of_words == {id: set(lines[int(id.rpartition(":")[2])]["judged"].split()) for id in of_words}
    assert set.union(*of_words.values()) == {"exact", "math"}
    lines[4]["judged"] = "maths"
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(each) for each in lines))
    assert main(["check", str(path)]) == 2
    assert "names the reward `maths` (taskset.fields.rewards), and there are exact, math" in capsys.readouterr().err


def named_workflows(folder: Path, names: list[str | None], **changes: Any) -> Path:
    lines = [each | {"by": names[n % len(names)]} for n, each in enumerate(WORDS)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(each) for each in lines))
    (folder / "flow.py").write_text(FLOWS)
    words = {"taskset": {"path": str(folder / "rows.jsonl"), "fields": {"workflow": "by"}}, "pipeline": None}
    return run_file(folder, domains_of(folder, **words), plugins=["flow.py"], evaluation=None, steps=2, **changes)


def test_a_row_names_its_workflow(tmp_path: Path) -> None:
    rollmill.run(named_workflows(tmp_path, ["twice", None, "single_turn"]), [], tmp_path / "run")
    calls: dict[tuple[str, str], int] = {}
    for row in rollouts(tmp_path / "run"):
        key = row["task_id"], row["group"]
        calls[key] = calls.get(key, 0) + 1
    found: dict[tuple[bool, int], int] = {}
    for (task, _), count in calls.items():
        twice = task.startswith("words") and int(task.rpartition(":")[2]) % 3 == 0
        found[twice, count] = found.get((twice, count), 0) + 1
    assert set(found) == {(False, 4), (False, 3), (True, 6)}  # 3 rollouts of 2 calls


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["twice", "unheard_of"], "rows.jsonl:2: the workflow (column by) is 'unheard_of', and there is none of that"),
        (["live_requests"], "rows.jsonl:1: the workflow (column by) is 'live_requests', which has no tasks"),
        ([None, "tools"], "task `rows:1` names the workflow `tools` (taskset.fields.workflow), which cannot"),
    ],
)
def test_a_workflow_of_a_row_that_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str | None], says: str
) -> None:
    assert main(["check", str(named_workflows(tmp_path, names))]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_tools_that_only_a_row_s_workflow_may_call_are_allowed(tmp_path: Path) -> None:
    assert main(["check", str(named_workflows(tmp_path, [None, "tools"], tools=["calculator"]))]) == 0


def test_names_of_workflows_that_nothing_rolls_out_are_refused(tmp_path: Path) -> None:
    path = named_workflows(tmp_path, [None], algorithm={"name": "sft"})
    with pytest.raises(ConfigError) as error:
        load_run(path)
    assert "domains.words.taskset.fields.workflow: not honoured: the stage rolls no tasks out" in str(error.value)


def test_a_served_model_is_not_asked_by_workflows_of_rows(tmp_path: Path) -> None:
    stage = load_run(named_workflows(tmp_path, [None])).stages[0]
    with pytest.raises(ConfigError, match=r"served\.yaml: rows may name workflows .*taskset\.fields\.workflow"):
        check_endpoint_support(stage, "served.yaml")


def test_lines_that_name_their_domain_are_graded_by_its_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, domains_of(tmp_path), evaluation=None)
    lines = [
        {"domain": "add", "prompt": "1+1=", "response": "it is #2", "answer": "2"},
        {"domain": "words", "prompt": "up ab:", "response": "AB", "answer": "AB"},
    ]
    given, out = tmp_path / "given.jsonl", tmp_path / "graded.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["grade", "--run", str(path), "--input", str(given), "--output", str(out)]
    assert main(argv) == 0
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert graded[0]["reward"] == 1.0
    assert [set(each["parts"]) for each in graded] == [{"exact"}, {"format", "repetition"}]
    given.write_text(json.dumps(lines[0] | {"domain": "sums"}) + "\n")
    capsys.readouterr()
    assert main(argv) != 0
    assert "names the domain 'sums'; the run has" in " ".join(capsys.readouterr().err.split())
