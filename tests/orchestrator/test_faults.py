"""Interruptions, full disks and damaged files: nothing is lost, nothing is left running, and the message helps."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.forks import Ended, Forks, ended, send
from support.tiny import GRPO, SFT, outcome, tiny_run, trainer
from support.waiting import wait_until

from rollmill.orchestrator.interrupt import Interrupts

ONLY_RL = {"stages": None, "steps": 6, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}}
TIME_TO_INTERRUPT = [SFT, GRPO | {"steps": 60}]
LONGER = ONLY_RL | {"steps": 12}
SLOW_REWARD = "import time\ndef mine(task, completion):\n    time.sleep({})\n    return float('1' in completion.text)\n"
MINE = [{"name": "python", "function": "mine.py:mine"}]


@pytest.fixture(scope="module")
def whole(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run, `out`, and its run file."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_run(folder)
    assert server.run("run", "run.yaml", "--out", "out", folder=folder).code == 0
    return folder


@pytest.fixture(scope="module")
def whole_longer(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run that does not end before a signal of the test has come."""
    folder = tmp_path_factory.mktemp("whole-longer")
    tiny_run(folder, stages=TIME_TO_INTERRUPT)
    assert server.run("run", "run.yaml", "--out", "out", folder=folder).code == 0
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be spoilt."""
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def steps(run: Path) -> int:
    """Training steps in metrics.jsonl."""
    path = run / "metrics.jsonl"
    return sum('"version"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def clean(end: Ended, code: int, *says: str) -> None:
    """The documented exit code, and a message instead of a traceback."""
    assert end.code == code, end.err
    for text in says:
        assert text in end.err, end.err
    assert "Traceback" not in end.err
    assert "never" not in end.err


# -- interruptions ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGINT, 1),
        (signal.SIGTERM, 9),
        (signal.SIGHUP, 5),
        pytest.param(signal.SIGINT, 9, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param(signal.SIGTERM, 1, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_interrupted_once_writes_a_checkpoint_and_resumes_exactly(
    server: Forks, whole_longer: Path, tmp_path: Path, number: signal.Signals, after: int
) -> None:
    tiny_run(tmp_path, stages=TIME_TO_INTERRUPT)
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: steps(tmp_path / "out") >= after)
    assert send(server.pid, number)
    end = server.wait()
    clean(end, 130, "ending with a checkpoint of the last step", "interrupted")
    assert "go on with: rollmill resume out" in end.out
    assert json.loads((tmp_path / "out/summary.json").read_text())["status"] == "interrupted"
    newest = max((tmp_path / "out/checkpoints").glob("step-*"))
    assert newest.name == f"step-{steps(tmp_path / 'out'):06d}"
    assert server.run("resume", "out", folder=tmp_path).code == 0
    assert outcome(tmp_path / "out") | {"checkpoints": None} == outcome(whole_longer / "out") | {"checkpoints": None}


def test_under_nohup_a_closed_terminal_does_not_end_a_run() -> None:
    async def handler() -> object:
        with Interrupts().installed():
            return signal.getsignal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(handler()) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_interrupted_with_rewards_under_way_keeps_them(server: Forks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW_REWARD.format(0.02))
    tiny_run(tmp_path, **ONLY_RL | {"steps": 10}, max_staleness=1, rewards=MINE, evaluation=None)
    assert server.run("run", "run.yaml", "--out", "whole", folder=tmp_path).code == 0
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: steps(tmp_path / "out") >= 1)
    send(server.pid, signal.SIGINT)
    clean(server.wait(), 130)
    state = json.loads((max((tmp_path / "out/checkpoints").glob("step-*")) / "state.json").read_text())
    assert len(state["current"]["groups"]) == 4
    assert server.run("resume", "out", folder=tmp_path).code == 0
    assert outcome(tmp_path / "out") | {"checkpoints": None} == outcome(tmp_path / "whole") | {"checkpoints": None}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_twice_ends_at_once_with_older_checkpoints_whole(server: Forks, tmp_path: Path) -> None:
    """The first Ctrl-C waits for rewards that a checkpoint has to hold; these take minutes."""
    (tmp_path / "mine.py").write_text(
        "import pathlib, time\nhere = pathlib.Path(__file__).parent\ndef mine(task, completion):\n"
        "    if (here / 'slow').exists():\n        (here / 'begun').touch()\n        time.sleep(1000)\n"
        "    return float('1' in completion.text)\n"
    )
    tiny_run(tmp_path, **ONLY_RL | {"steps": 40}, max_staleness=1, rewards=MINE, evaluation=None)
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: (tmp_path / "out/checkpoints/step-000002").exists())
    (tmp_path / "slow").touch()
    wait_until((tmp_path / "begun").exists)
    send(server.pid, signal.SIGINT)
    wait_until(lambda: "ending with a checkpoint of the last step" in server.output())
    assert not ended(server.pid), "the first Ctrl-C waits for the rewards"
    send(server.pid, signal.SIGINT)
    assert server.reaches(lambda: False, limit_s=30) is False, "the second does not"
    clean(server.wait(), 130, "interrupted")
    (tmp_path / "slow").unlink()
    clean(server.run("resume", "out", folder=tmp_path), 0)


@pytest.mark.slow
def test_interrupted_while_loading_ends_at_once(server: Forks, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "import time, pathlib\ndef rows():\n    pathlib.Path('loading').touch()\n"
        "    while True:\n        time.sleep(0.01)\n"
    )
    tiny_run(tmp_path, **ONLY_RL | {"taskset": {"function": "rows.py:rows", "options": None}})
    server.start("run", "run.yaml", folder=tmp_path)
    assert server.reaches(lambda: (tmp_path / "loading").exists())
    send(server.pid, signal.SIGINT)
    clean(server.wait(), 130, "interrupted")


# -- full disks and wrong permissions -----------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk: Path, left: int) -> Path:
    """Leave `left` bytes free."""
    filler = disk / "filler"
    filler.write_bytes(b"x" * (shutil.disk_usage(disk).free - left))
    return filler


@pytest.mark.slow
def test_a_full_disk_loses_no_checkpoint_and_the_run_resumes(server: Forks, tmp_path: Path, disk: Path) -> None:
    tiny_run(tmp_path, **LONGER, model={"new": {"hidden_size": 128}}, checkpoint={"keep_last": 1})
    assert server.run("run", "run.yaml", "--out", "whole", folder=tmp_path).code == 0
    server.start("run", "run.yaml", "--out", "disk/out", folder=tmp_path)
    assert server.reaches(lambda: (disk / "out/checkpoints/step-000002").exists())
    send(trainer(disk / "out"), signal.SIGSTOP)
    newest = max((disk / "out/checkpoints").glob("step-*"))
    filler = fill(disk, 500_000)  # enough for metrics, too little for a checkpoint
    send(trainer(disk / "out"), signal.SIGCONT)
    clean(
        server.wait(), 1, "cannot write the checkpoint disk/out", "No space left", "free some space", "rollmill resume"
    )
    assert max((disk / "out/checkpoints").glob("step-*")) >= newest
    filler.unlink()
    clean(server.run("resume", "disk/out", folder=tmp_path), 0)
    assert outcome(disk / "out") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_metrics_that_cannot_be_written_end_the_run(server: Forks, tmp_path: Path, disk: Path) -> None:
    tiny_run(tmp_path, **LONGER, monitor={"report": False})
    server.start("run", "run.yaml", "--out", "disk/out", folder=tmp_path)
    assert server.reaches(lambda: (disk / "out/checkpoints/step-000002").exists())
    send(trainer(disk / "out"), signal.SIGSTOP)
    filler = fill(disk, 0)
    send(trainer(disk / "out"), signal.SIGCONT)
    clean(server.wait(), 1, "cannot write", "No space left", "ree some space")
    filler.unlink()
    clean(server.run("resume", "disk/out", folder=tmp_path), 0)
    assert steps(disk / "out") == 12


@pytest.mark.parametrize(
    ("gone", "buffer", "says"),
    [
        ("", {"store": "memory"}, "metrics.jsonl was removed or replaced"),
        ("buffer.sqlite", {"store": "sql"}, "buffer.sqlite was removed or replaced while it was in use"),
    ],
)
def test_a_run_whose_files_are_taken_away_is_an_error(
    server: Forks, tmp_path: Path, gone: str, buffer: dict[str, str], says: str
) -> None:
    rare = {"checkpoint": {"every": 1000}, "monitor": {"rollouts_every": 1000, "timeline_every": 1000}}
    tiny_run(tmp_path, **ONLY_RL | rare | {"steps": 500}, evaluation=None, buffer=buffer)  # writes little else
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: steps(tmp_path / "out") >= 2)
    (tmp_path / "out" / gone).rename(tmp_path / "elsewhere")
    clean(server.wait(), 1, says)


@pytest.mark.slow
def test_a_run_goes_on_though_the_reader_of_its_output_has_gone(tmp_path: Path) -> None:
    tiny_run(tmp_path, **ONLY_RL, evaluation=None)
    command = [sys.executable, "-m", "rollmill", "run", "run.yaml", "--out", "out"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stderr is not None
    assert "run tiny" in run.stdout.readline()
    run.stdout.close()
    said = run.stderr.read()
    assert run.wait() == 0, said
    assert "the program that read the output has ended; the run goes on" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert json.loads((tmp_path / "out/summary.json").read_text())["status"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "options"), [([1], []), ([2], ["--json"]), ([0, 1, 2], [])])
def test_a_run_needs_no_standard_streams(server: Forks, tmp_path: Path, closed: list[int], options: list[str]) -> None:
    tiny_run(tmp_path, stages=[SFT | {"steps": 1}, GRPO | {"steps": 1}])
    end = server.run("run", "run.yaml", "--out", "out", *options, folder=tmp_path, closed=closed)
    assert (end.code, end.err) == (0, "")
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["status"] == "done"
    assert not options or json.loads(end.out) == summary  # alone, though messages go to the stream that is closed


@pytest.mark.slow
def test_a_run_goes_on_though_the_disk_of_its_output_is_full(tmp_path: Path) -> None:
    tiny_run(tmp_path, **ONLY_RL, evaluation=None)
    for name, options, code in (("out", [], 0), ("again", ["--json"], 1)):
        command = [sys.executable, "-m", "rollmill", "run", "run.yaml", "--out", name, *options]
        with open("/dev/full", "w") as full:
            run = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
        assert run.returncode == code, run.stderr
        assert "Traceback" not in run.stderr
        assert "Exception ignored" not in run.stderr
        assert "No space left" in run.stderr
        assert json.loads((tmp_path / name / "summary.json").read_text())["status"] == "done"


# -- damaged and misused run directories --------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def without_aside(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"checkpoints": [name for name in run["checkpoints"] if name.startswith("step-")]}


def checkpoints_of(folder: Path) -> list[Path]:
    return sorted((folder / "out/checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("model.safetensors", flip, "model.safetensors has other content"),
        ("trainer.pt", zero_half, "trainer.pt has other content"),
        ("model.safetensors", cut, "model.safetensors has "),
        ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
        pytest.param("state.json", empty, "state.json has 0 bytes", marks=pytest.mark.slow),
        pytest.param("trainer.pt", cut, "trainer.pt has ", marks=pytest.mark.slow),
        pytest.param("manifest.json", empty, "manifest.json has other content", marks=pytest.mark.slow),
        pytest.param("manifest.json", Path.unlink, "manifest.json is missing", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_run_goes_on_from_the_one_before(
    server: Forks, whole: Path, copy: Path, name: str, damage: Callable[[Path], object], says: str
) -> None:
    *_, before, newest = checkpoints_of(copy)
    damage(newest / name)
    (copy / "out/evaluations/step-000099.json").write_text("{}")
    (copy / "out/evaluations/step-000099.jsonl").write_text("")
    end = server.run("resume", "out", folder=copy)
    clean(end, 0)
    assert f"the checkpoint of step 14 is damaged ({says}" in end.out
    assert "kept as out/checkpoints/damaged-000014" in end.out
    assert f"the run goes on from the checkpoint of step {int(before.name[5:])}, the newest one" in end.out
    assert (copy / "out/checkpoints/damaged-000014").is_dir()
    assert without_aside(outcome(copy / "out")) == outcome(whole / "out")
    assert not (copy / "out/evaluations/step-000099.json").exists()


def test_with_no_whole_checkpoint_left_a_run_says_so_and_does_not_begin_again(
    server: Forks, whole: Path, copy: Path
) -> None:
    found = checkpoints_of(copy)
    for path in found:
        flip(path / "model.safetensors")
    says = ["no whole checkpoint left", *(f"damaged-{path.name[5:]}" for path in found)]
    clean(server.run("resume", "out", folder=copy), 1, *says, "model.safetensors has other content")
    before = (copy / "out/metrics.jsonl").read_bytes()
    clean(server.run("resume", "out", folder=copy), 1, *says)
    assert (copy / "out/metrics.jsonl").read_bytes() == before == (whole / "out/metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sql"])
def test_two_damaged_checkpoints_cost_their_steps_and_no_more(server: Forks, tmp_path: Path, store: str) -> None:
    replay = {"groups": 2, "order": "priority", "priority": "advantage", "max_uses": 3, "decay": 0.8}
    changes = ONLY_RL | {"max_staleness": 1, "pipeline": [{"name": "group_variance"}], "checkpoint": {"keep_last": 9}}
    tiny_run(tmp_path, **changes, buffer={"store": store, "replay": replay}, taskset={"sampler": "prioritised"})
    assert server.run("run", "run.yaml", "--out", "out", folder=tmp_path).code == 0
    expected, found = outcome(tmp_path / "out"), checkpoints_of(tmp_path)
    assert len(found) >= 3
    flip(found[-1] / "trainer.pt")
    cut(found[-2] / "model.safetensors")
    end = server.run("resume", "out", folder=tmp_path)
    clean(end, 0)
    assert f"goes on from the checkpoint of step {int(found[-3].name[5:])}" in end.out
    assert without_aside(outcome(tmp_path / "out")) == expected


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "manifest.json").read_text()) | changes
    content.pop("sha256")
    content["sha256"] = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))


def test_a_checkpoint_of_a_later_format_is_refused_and_left_in_place(server: Forks, copy: Path) -> None:
    newest = checkpoints_of(copy)[-1]
    rewrite_manifest(newest, format=2, rollmill="7.8.9")
    clean(server.run("resume", "out", folder=copy), 1, newest.name, "format 2", "rollmill 7.8.9", "up to 1")
    assert newest.is_dir()


def test_a_checkpoint_without_a_format_is_refused_and_left_in_place(server: Forks, copy: Path) -> None:
    newest = checkpoints_of(copy)[-1]
    (newest / "manifest.json").unlink()
    state = json.loads((newest / "state.json").read_text())
    del state["format"]
    (newest / "state.json").write_text(json.dumps(state))
    end = server.run("resume", "out", folder=copy)
    clean(end, 1, f"{newest.name}/state.json has no format", "up to 1", "out of the run")
    assert newest.is_dir()


@pytest.mark.parametrize("name", ["trainer.pt", "state.json"])
def test_one_that_cannot_be_read_though_it_is_whole_is_named_but_left_in_place(
    server: Forks, copy: Path, name: str
) -> None:
    newest = checkpoints_of(copy)[-1]
    (newest / name).write_bytes(b"no checkpoint")
    record = {"bytes": 13, "sha256": sha256(b"no checkpoint").hexdigest()}
    files = json.loads((newest / "manifest.json").read_text())["files"]
    rewrite_manifest(newest, files=files | {name: record})
    end = server.run("resume", "out", folder=copy)
    clean(end, 1, "cannot read the checkpoint", newest.name, "Remove that folder")
    assert newest.is_dir()


@pytest.mark.parametrize("content", ["", '{"threads": 1, "precision": "fp32"}'], ids=["empty", "no id"])
def test_damaged_settings_of_the_machine_that_no_checkpoint_has_are_an_error_that_says_what_to_do(
    server: Forks, copy: Path, content: str
) -> None:
    shutil.rmtree(copy / "out/checkpoints")
    (copy / "out/machine.json").write_text(content)
    clean(server.run("resume", "out", folder=copy), 1, "machine.json is damaged", "put the file back, or start a new")


@pytest.mark.parametrize("settings", ["kept", "lost"])
def test_a_checkpoint_of_another_run_is_refused_with_both_ids(server: Forks, copy: Path, settings: str) -> None:
    newest = checkpoints_of(copy)[-1]
    own = json.loads((copy / "out/machine.json").read_text())["run_id"]
    rewrite_manifest(newest, run_id="another")
    if settings == "lost":
        (copy / "out/machine.json").unlink()
    clean(server.run("resume", "out", folder=copy), 1, newest.name, "was written by the run another", f"the run {own}")
    assert newest.is_dir()
    shutil.move(newest, copy / newest.name)
    clean(server.run("resume", "out", folder=copy), 0)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"algorithm": {"name": "distill", "teacher": "base"}}, 0),
        ({"model": {"path": "base", "new": None, "lora": {"rank": 2}}}, 1),
    ],
    ids=["teacher", "under adapters"],
)
def test_a_model_that_changed_between_two_starts_is_named(
    server: Forks, copy: Path, changes: dict[str, Any], code: int
) -> None:
    base = copy / "base"
    shutil.copytree(checkpoints_of(copy)[-1], base, ignore=shutil.ignore_patterns("manifest.json", "state.json"))
    tiny_run(copy, **ONLY_RL | {"steps": 2, "evaluation": None} | changes)
    clean(server.run("run", "run.yaml", "--out", "mine", folder=copy), 0)
    flip(base / "model.safetensors")
    end = server.run("resume", "mine", folder=copy)
    clean(end, code)
    says = f"{base} has changed since the run's last start"
    assert says in (end.err if code else end.out)
    assert "model.safetensors has other content" in (end.err if code else end.out)
    if not code:
        assert says not in server.run("resume", "mine", folder=copy).out, "it is said once"


def without_id(path: Path) -> None:
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "run_id"}))


@pytest.mark.parametrize("damage", [empty, Path.unlink, without_id])
def test_lost_settings_of_the_machine_are_made_again_from_a_checkpoint(
    server: Forks, copy: Path, damage: Callable[[Path], object]
) -> None:
    before = (copy / "out/machine.json").read_bytes()
    damage(copy / "out/machine.json")
    clean(server.run("resume", "out", folder=copy), 0)
    assert (copy / "out/machine.json").read_bytes() == before


@pytest.mark.parametrize(
    "argv",
    [
        ("eval", "out"),
        ("bench", "out"),
        ("merge", "out", "out/checkpoints/step-000012", "--out", "merged"),
        ("serve", "out", "--no-key"),
        ("run", "again.yaml", "--out", "again"),
    ],
)
def test_whoever_reads_a_damaged_checkpoint_names_the_damage(server: Forks, copy: Path, argv: tuple[str, ...]) -> None:
    newest = checkpoints_of(copy)[-1]
    flip(newest / "model.safetensors")
    run = yaml.safe_load((copy / "run.yaml").read_text()) | {"model": {"path": str(newest)}}
    (copy / "again.yaml").write_text(yaml.safe_dump(run))
    clean(server.run(*argv, folder=copy), 1, f"{newest.name} is damaged: model.safetensors has other content")
    assert newest.is_dir()


def test_leftovers_of_killed_processes_are_swept(server: Forks, copy: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = copy / f"out/rollouts/.step-000001.jsonl.{ended.pid}@{socket.gethostname()}.tmp"
    unasked = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, unasked.pid, os.WEXITED | os.WNOWAIT)  # ended, but still listed, as just after a kill
    listed = copy / f"out/evaluations/.step-000002.jsonl.{unasked.pid}@{socket.gethostname()}.tmp"
    alive = copy / f"out/.metrics.jsonl.{os.getpid()}@{socket.gethostname()}.tmp"
    for path in (left, listed, alive):
        path.write_text("half")
    (copy / f"out/checkpoints/.writing-000002-{ended.pid}").mkdir()
    clean(server.run("resume", "out", folder=copy), 0)
    unasked.wait()
    assert not left.exists()
    assert not listed.exists()
    assert alive.exists()
    assert not list((copy / "out/checkpoints").glob(".writing-*"))


def test_damaged_metrics_are_named(server: Forks, copy: Path) -> None:
    lines = (copy / "out/metrics.jsonl").read_text().splitlines()
    (copy / "out/metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]) + "\n")
    clean(server.run("resume", "out", folder=copy), 1, "metrics.jsonl:4", "Remove the line")


def test_lost_steps_of_the_metrics_are_named(server: Forks, copy: Path) -> None:
    path = copy / "out/metrics.jsonl"
    kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] not in (3, 4, 5, 9)]
    path.write_text("".join(kept))
    end = server.run("resume", "out", folder=copy)
    clean(end, 0)
    assert "metrics.jsonl lacks 4 steps (3 to 5, 9)" in end.out
    events = [json.loads(line) for line in (copy / "out/events.jsonl").read_text().splitlines()]
    assert any("lacks 4 steps" in str(event) for event in events)


def test_a_changed_taskset_is_refused(server: Forks, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1\n", "answer": str(i + 1), "response": f"#{i + 1}"} for i in range(20)]
    write = lambda: (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))  # noqa: E731
    write()
    tiny_run(tmp_path, **ONLY_RL, taskset={"function": None, "options": None, "path": "tasks.jsonl"}, evaluation=None)
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches(lambda: (tmp_path / "out/checkpoints/step-000002").exists())
    send(server.pid)
    server.wait()
    rows[3]["prompt"] = "9+9\n"
    write()
    clean(server.run("resume", "out", folder=tmp_path), 1, "taskset tasks changed", "start a new run")


def test_a_directory_that_holds_a_run_is_not_overwritten(server: Forks, copy: Path) -> None:
    before = outcome(copy / "out")
    clean(server.run("run", "run.yaml", "--out", "out", folder=copy), 2, "already holds a run", "rollmill resume out")
    assert outcome(copy / "out") == before


@pytest.mark.slow
def test_a_start_that_failed_can_be_repeated_in_the_same_directory(server: Forks, tmp_path: Path) -> None:
    tiny_run(tmp_path, **ONLY_RL | {"taskset": {"options": {"colour": 1}}})
    clean(server.run("run", "run.yaml", "--out", "out", folder=tmp_path), 1, "colour")
    tiny_run(tmp_path, **ONLY_RL, steps_=None)
    clean(server.run("run", "run.yaml", "--out", "out", folder=tmp_path), 0)


def test_resuming_a_finished_run_changes_nothing(server: Forks, whole: Path, copy: Path) -> None:
    clean(server.run("resume", "out", folder=copy), 0)
    assert outcome(copy / "out") == outcome(whole / "out")


# -- eval and show ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("eval", "out", "--step", "99"), 1, "no checkpoint of step 99"),
        (("eval", "out", "--step", "0"), 1, "no checkpoint of step 0"),
        (("eval", "out", "--set", "evaluation.colour=1"), 2, "colour"),
        (("show", "out", "--step", "99"), 2, "step 99"),
        (("show", "out", "--task", "rows:99999"), 2, "rows:99999"),
    ],
)
def test_what_a_run_does_not_have(server: Forks, whole: Path, argv: tuple[str, ...], code: int, says: str) -> None:
    clean(server.run(*argv, folder=whole), code, says)


@pytest.mark.slow
def test_eval_without_evaluation_or_checkpoint(server: Forks, tmp_path: Path, copy: Path) -> None:
    tiny_run(tmp_path, **ONLY_RL, evaluation=None, steps_=None)
    assert server.run("run", "run.yaml", "--out", "out", folder=tmp_path).code == 0
    clean(server.run("eval", "out", folder=tmp_path), 2, "no evaluation section")
    shutil.rmtree(copy / "out/checkpoints")
    clean(server.run("eval", "out", folder=copy), 1, "no checkpoint", "none")


@pytest.mark.slow
def test_eval_says_what_the_run_said(server: Forks, whole: Path) -> None:
    end = server.run("eval", "out", "--json", folder=whole)
    clean(end, 0)
    last = json.loads((whole / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(end.out) == {"step": 14} | {key: last[key] for key in last if key.startswith("eval/")}
    more = server.run("eval", "out", "--json", "--set", "evaluation.samples=3", folder=whole)
    clean(more, 0)
    assert json.loads(more.out)["eval/greedy"] == last["eval/greedy"]


# -- nothing is left running --------------------------------------------------------------------------------------


def graders(pid: int) -> list[int]:
    """Grader processes that were started by a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and not ended(int(entry.name)):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if any(word.endswith(b"grader_worker.py") for word in words) and str(pid).encode() in words:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end_it", ["kill", "interrupt", "fail", pytest.param("finish", marks=pytest.mark.slow)])
def test_no_grader_outlives_its_run(server: Forks, tmp_path: Path, end_it: str) -> None:
    rewards = [{"name": "math"}]
    if end_it in ("fail", "finish"):
        then = "raise RuntimeError('enough')" if end_it == "fail" else "return 1.0"
        (tmp_path / "mine.py").write_text(
            "import time, pathlib\ndef mine(task, completion):\n"
            f"    while not pathlib.Path('go').exists():\n        time.sleep(0.01)\n    {then}\n"
        )
        rewards += MINE
    tiny_run(
        tmp_path, **ONLY_RL | {"steps": 40 if end_it in ("kill", "interrupt") else 3}, rewards=rewards, evaluation=None
    )
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert server.reaches((tmp_path / "out/processes/trainer.json").exists)
    pid = trainer(tmp_path / "out")
    assert server.reaches(lambda: bool(graders(pid)))
    if end_it == "kill":
        send(server.pid)
    elif end_it == "interrupt":
        assert server.reaches(lambda: steps(tmp_path / "out") >= 1)
        send(server.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    code = server.wait().code
    assert code == {"kill": -9, "interrupt": 130, "fail": 1, "finish": 0}[end_it]
    wait_until(lambda: not graders(pid))


# -- what is right about it ---------------------------------------------------------------------------------------


def test_tasks_that_are_too_long_can_be_left_out(server: Forks, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * n + "\n", "answer": "2", "response": "#2"} for n in (4, 80, 5, 70)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"function": None, "options": None, "path": "tasks.jsonl", "on_bad_row": "skip"}
    stages = [SFT | {"steps": 2}, GRPO | {"steps": 2}]
    tiny_run(tmp_path, taskset=source, evaluation={"taskset": source}, stages=stages)
    end = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    clean(end, 0)
    for what in ("demonstration", "prompt"):
        assert f"2 tasks loaded, 2 left out: 2 {what} too long\n" in end.out
    assert "2 of 4 prompts do not fit the model's context of 64 tokens and were left out" in end.out
    assert "2 of 4 demonstrations do not fit" in end.out
    assert "task tasks:1: its prompt has 81 tokens, and 63 fit" in end.out


@pytest.mark.slow
def test_group_rewards_judge_whole_groups(server: Forks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def mine(task, completions):\n"
        "    assert [c.index for c in completions] == list(range(len(completions)))\n"
        "    best = max(len(c.text) for c in completions)\n"
        "    return [float(len(c.text) == best) for c in completions]\n"
        "mine.group = True\n"
    )
    tiny_run(tmp_path, **ONLY_RL, rewards=[*MINE, {"name": "format", "pattern": "1"}], evaluation=None)
    clean(server.run("run", "run.yaml", "--out", "out", folder=tmp_path), 0)
    for path in (tmp_path / "out/rollouts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for group in {row["group"] for row in rows}:
            mine = [row for row in rows if row["group"] == group]
            best = max(len(row["response"]) for row in mine)
            assert all(row["reward_parts"]["mine"] == (len(row["response"]) == best) for row in mine)
