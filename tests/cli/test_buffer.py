"""`rollmill buffer`: looking in, taking along, cleaning up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.buffer_groups import group, same_groups
from support.tiny import tiny_run
from support.waiting import wait_until

from rollmill.buffer import open_run_store
from rollmill.buffer.base import FEEDBACK, PIPELINE, ExperienceKind, Group
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.sql import SqlStore
from rollmill.cli import main
from rollmill.config.buffer import ReplayConfig
from rollmill.config.loader import load_run
from rollmill.supervision.run_lock import hold_run_lock

OK, FAILED, USAGE = 0, 1, 2


def make_run(folder: Path, run_id: str = "feedc0de99", config: str = "name: x\n") -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer/run.json").write_text(json.dumps({"fingerprint": "f00d"}))
    (folder / "config.yaml").write_text(config)
    (folder / "machine.json").write_text(json.dumps({"run_id": run_id}))
    return folder


def opened(run: Path) -> SqlStore:
    run_id = json.loads((run / "machine.json").read_text())["run_id"]
    return SqlStore(Database(sqlite_url(run / "buffer.sqlite")), run_id)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three groups taken in three steps, one waiting, an expert one by Ann, a removed one."""
    folder = make_run(tmp_path / "run")
    store = opened(folder)
    steered = group("g3", version=2, rewards=(0.25, None))
    steered.experiences[0].response = "\x1b[31mred"
    steered.experiences[0].reward_parts = {"math": 0.25, "judge": None}
    store.put([group("g0"), group("g1", version=1, rewards=(1.0, 1.0)), group("g2", version=1), steered])
    expert = Group(
        "edit", group("e").experiences[:1], ExperienceKind.EXPERT, writer=FEEDBACK, author="Ann", info={"why": "typo"}
    )
    store.put([expert, group("oops", writer=PIPELINE, kind=ExperienceKind.PREFERENCE)])
    for step in (1, 2, 3):
        taken = store.take(1, step=step, deadline_s=0)
        store.update_priorities(taken, step=step)
    store.remove(["oops"], by="Bob")
    store.close()
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = OK) -> str:
    assert main(["buffer", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out if code == OK else captured.err


def test_ls_lists_the_newest_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(call(capsys, "ls", run, "--json"))
    assert [row["id"] for row in rows] == ["oops", "edit", "g3", "g2", "g1", "g0"]
    assert [row["state"] for row in rows] == ["removed", "kept", "waiting", "taken", "taken", "taken"]
    assert (rows[2]["reward"], rows[3]["reward"], rows[3]["step"], rows[3]["version"]) == (0.25, 0.5, 3, 1)
    lines = call(capsys, "ls", run, "--limit", 2).splitlines()
    assert lines[0].split()[:4] == ["number", "id", "kind", "state"]
    assert lines[1].split()[:4] == ["6", "oops", "preference", "removed"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--kind", "expert"], ["edit"]),
        (["--author", "Ann"], ["edit"]),
        (["--task", "task of g1/0"], ["g1"]),
        (["--reward-at-least", "0.5", "--kind", "usual"], ["g2", "g1", "g0"]),
        (["--reward-at-most", "0.3"], ["g3"]),
        (["--author", "nobody"], []),
    ],
)
def test_ls_filters(run: Path, options: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["id"] for row in json.loads(call(capsys, "ls", run, "--json", *options))] == expected


def test_show_prints_a_group_that_cannot_steer_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "show", run, "g3")
    assert "group g3 (number 4) of task task of g3/0: usual, waiting, by explorer" in out
    assert "== g3/0: reward 0.25, math 0.25, judge -, 4 tokens, eos ==" in out
    assert "tokens 2 to 6 by version 2" in out
    assert "-- prompt --\n1+1=\n-- response --\n\\x1b[31mred" in out
    assert "\x1b" not in out
    assert "== g3/1: no reward" in out


@pytest.mark.parametrize("name", ["g1", "2", "g1/0"])
def test_show_finds_a_group(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "show", run, name)
    assert out.startswith("group g1 (number 2)")
    assert "learned from in step 2, priority 1 afterwards" in out
    found = json.loads(call(capsys, "show", run, name, "--json"))
    assert found["uses"] == [{"step": 2, "priority": 1.0}]
    assert found["experiences"][0]["segments"] == [[2, 6, 1]]


def test_show_prefers_an_id_to_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "odd")
    store = opened(run)
    store.put([group("2"), group("g1"), group("g1/0")])
    store.close()
    assert call(capsys, "show", run, "2").startswith("group 2 (number 1)")
    assert call(capsys, "show", run, "g1/0").startswith("group g1/0 (number 3)")
    assert "has no group \\udcff" in call(capsys, "show", run, "\udcff", code=USAGE)


def test_show_names_who_made_and_removed_feedback(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 'expert, kept, by feedback (Ann)\ninfo: {"why": "typo"}' in call(capsys, "show", run, "edit")
    assert "removed by Bob" in call(capsys, "show", run, "oops")


def test_stats_count(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capsys, "stats", run, "--json"))
    assert (found["groups"], found["experiences"], found["uses"], found["not_judged"]) == (6, 11, 3, 1)
    assert found["by_kind"] == {"expert": 1, "preference": 1, "usual": 4}
    assert found["by_state"]["usual: taken"] == 3
    assert found["by_version"] == {"0": 3, "1": 2, "2": 1}
    assert found["rewards"] == [
        {"from": 0.0, "to": 0.0, "count": 3},
        {"from": 0.25, "to": 0.25, "count": 1},
        {"from": 1.0, "to": 1.0, "count": 6},
    ]
    assert sum(found["by_writer"].values()) == 6
    assert [each["kind"] for each in found["writers"]].count("explorer") == 1
    out = call(capsys, "stats", run)
    assert "6 groups, 11 experiences" in out
    assert "reward 1                       6 ##############################" in out


def test_export_and_import(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all.parquet"
    assert call(capsys, "export", run, "--to", file) == f"5 groups written to {file}\n"
    assert call(capsys, "import", run, file) == "0 groups added, 5 were there already\n"
    other = make_run(tmp_path / "other", "00ff")
    opened(other).close()
    assert call(capsys, "import", other, file) == "5 groups added, 0 were there already\n"
    assert json.loads(call(capsys, "import", other, file, "--json")) == {"groups": 5, "new": 0}
    store, back = open_run_store(run), open_run_store(other)
    mine = [each for kind in ExperienceKind for _, each in store.read(kind)]
    theirs = [each for kind in ExperienceKind for _, each in back.read(kind)]
    assert [each.id for each in theirs] == [f"feedc0de-{each.id}" for each in mine]
    assert back.waiting() == 4
    call(capsys, "export", run, "--to", file, "--kind", "expert")
    assert same_groups(list(next(iter(store.read(ExperienceKind.EXPERT)))[1:]), mine[4:])


def test_import_says_what_to_start_first(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, later = tmp_path / "all.parquet", tmp_path / "later"
    call(capsys, "export", run, "--to", file)
    for missing in ("config.yaml", "machine.json", "tokenizer/run.json"):
        said = call(capsys, "import", later, file, code=USAGE)
        assert f"later holds no run yet (no {missing}): start it first" in said
        assert "mode=train --out" in said
        assert "--wait SECONDS" in said
        later.mkdir(exist_ok=True)
        if missing != "tokenizer/run.json":
            (later / missing).write_text(json.dumps({"run_id": "00ff", "mode": "train"}))


def test_import_waits_for_a_trainer_that_is_being_started(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer claims the directory first, and writes its settings, its id and its tokenizer later."""
    file, later = tmp_path / "all.parquet", tmp_path / "later"
    call(capsys, "export", run, "--to", file)
    tiny_run(tmp_path, stages=None, steps=2, evaluation=None, algorithm={"name": "grpo"}, mode="train")
    settings = load_run(tmp_path / "run.yaml").to_yaml()
    codes: list[int] = []
    words = ["buffer", "import", str(later), str(file), "--json"]
    command = threading.Thread(target=lambda: codes.append(main(words)), daemon=True)
    with hold_run_lock(later):
        command.start()
        wait_until(lambda: f"waiting for the run in {later} to start\n" in capsys.readouterr().err)
        (later / "config.yaml").write_text(settings)
        (later / "machine.json").write_text(json.dumps({"run_id": "00ff"}))
        assert command.is_alive(), "the tokenizer is not there yet"
        (later / "tokenizer").mkdir()
        (later / "tokenizer" / "run.json").write_text(json.dumps({"fingerprint": ""}))
        command.join(60)
    assert codes == [OK]
    assert json.loads(capsys.readouterr().out) == {"groups": 5, "new": 5}
    assert open_run_store(later).waiting() == 4, "the database is made, and the trainer finds it"


def test_import_refuses_the_tokens_of_another_vocabulary(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "all.parquet", make_run(tmp_path / "other", "00ff")
    opened(other).close()
    for folder, name in ((run, "aa"), (other, "bb")):
        (folder / "tokenizer" / "run.json").write_text(json.dumps({"fingerprint": name}))
    call(capsys, "export", run, "--to", file)
    assert "another tokenizer (aa) than this run's (bb)" in call(capsys, "import", other, file, code=FAILED)
    assert call(capsys, "ls", other) == "no such groups\n"


def checkpoint(run: Path, step: int) -> None:
    (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)


def test_gc_keeps_what_a_checkpoint_may_need(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 groups deleted (0 learned, 0 continued, 0 expired, 1 removed)" in call(
        capsys, "gc", run, "--older-than", 0
    )
    checkpoint(run, 2)
    checkpoint(run, 3)
    dry = call(capsys, "gc", run, "--older-than", 0, "--dry-run")
    assert "2 groups would be deleted (2 learned, 0 continued, 0 expired, 0 removed)" in dry
    assert "oldest checkpoint: step 2" in dry
    assert json.loads(call(capsys, "gc", run, "--older-than", "2", "--json"))["groups"] == 1
    assert json.loads(call(capsys, "gc", run, "--older-than", "0", "--json"))["learned"] == 1
    assert [row["id"] for row in json.loads(call(capsys, "ls", run, "--json"))] == ["edit", "g3", "g2"]
    store = opened(run)
    store.rewind({"store": "sql", "last": 6}, step=2)
    assert [each.id for each in store.take(2, step=3, deadline_s=0)] == ["g2", "g3"]
    assert store.put([group("new")]) == 1
    store.close()


def test_gc_keeps_what_replay_chooses_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", config="buffer: {replay: {groups: 1, capacity: 3}}\n")
    store = opened(run)
    store.put([group(f"g{i}", version=i) for i in range(8)])
    for step in range(1, 7):
        store.take(1, step=step, deadline_s=0, min_version=1 if step == 1 else None)
    rule = ReplayConfig(groups=9, capacity=3)
    mark = store.mark()
    checkpoint(run, 5)
    before = store.replay(rule, step=6, version=6, seed=1)
    assert (store.expired(), len(before)) == (1, 3)
    assert json.loads(call(capsys, "gc", run, "--older-than", "0", "--json"))["learned"] == 2
    assert store.expired() == 1, "what was counted stays counted"
    store.rewind(mark, step=5)
    assert same_groups(store.replay(rule, step=6, version=6, seed=1), before)
    store.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "{run}", "--kind", "best"], "--kind is usual, expert, preference, rated, partial, not 'best'"),
        (["show", "{run}", "g99"], "has no group g99; `rollmill buffer ls RUN` lists them"),
        (["ls", "nowhere"], "nowhere holds no run (no config.yaml)"),
    ],
)
def test_wrong_use(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in call(capsys, *(each.format(run=run) for each in arguments), code=USAGE)


@pytest.mark.slow
def test_no_torch_is_imported(run: Path) -> None:
    program = (
        "import sys; from rollmill.cli import main; "
        f"code = main(['buffer', 'stats', {str(run)!r}]); sys.exit(code or ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == OK
