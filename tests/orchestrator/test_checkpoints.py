"""Manifests, verification, formats and leftovers of checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollmill
from rollmill.errors import CheckpointError, DamagedCheckpointError
from rollmill.files import atomic_write, sweep_temporary
from rollmill.orchestrator import manifest
from rollmill.orchestrator.checkpoint import Checkpoints, read_state
from rollmill.orchestrator.checkpoint_listing import list_checkpoints
from rollmill.orchestrator.manifest import MANIFEST, find_damage, read_manifest, verifying, write_manifest
from rollmill.orchestrator.setup import read_run_id
from rollmill.remote.run_state import read_trainer_status

MACHINE = {"threads": 1, "precision": "fp32", "run_id": "r1"}
STORES = {"memory": {"store": "memory", "last": 3, "forgotten": 0, "groups": [{"large": 1}]}}


def made(run: Path, step: int) -> Path:
    """A checkpoint of small files, with a manifest."""
    folder = Checkpoints(run).path(step)
    (folder / "adapter").mkdir(parents=True)
    for name, text in {"config.json": "{}", "state.json": '{"format": 1}', "adapter/weights": "wwww"}.items():
        (folder / name).write_text(text)
    write_manifest(folder, step=step, machine=MACHINE, stores=STORES)
    return folder


def rewritten(folder: Path, **changes: Any) -> None:
    """Change a manifest as another version might write it."""
    content = json.loads((folder / MANIFEST).read_text()) | changes
    content.pop("sha256")
    (folder / MANIFEST).write_text(json.dumps(content | {"sha256": manifest._digest(content)}))


@pytest.mark.parametrize("arrived", [False, True])
def test_a_checkpoint_whose_replacement_did_not_arrive_is_put_back(tmp_path: Path, arrived: bool) -> None:
    """As a kill leaves it on a file system that cannot swap two folders at once."""
    checkpoints = Checkpoints(tmp_path)
    made(tmp_path, 12).rename(checkpoints.folder / ".replaced-000012")
    if arrived:
        (made(tmp_path, 12) / "new").touch()
    checkpoints.sweep()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000012"]
    assert (checkpoints.path(12) / "new").exists() == arrived
    assert not find_damage(checkpoints.path(12)) or arrived


def test_a_manifest_has_origin_buffer_mark_and_files(tmp_path: Path) -> None:
    found = read_manifest(made(tmp_path, 12))
    assert found is not None
    assert (found.format, found.rollmill, found.run_id, found.step) == (1, rollmill.__version__, "r1", 12)
    assert found.machine == MACHINE
    assert found.buffer == {"memory": {"store": "memory", "last": 3}}
    assert list(found.files) == ["adapter/weights", "config.json", "state.json"]
    assert found.files["adapter/weights"].bytes == 4


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("adapter/weights", "wwwv", "adapter/weights has other content than was written"),
        ("adapter/weights", "ww", "adapter/weights has 2 bytes instead of 4"),
        ("config.json", "", "config.json has 0 bytes instead of 2"),
        ("config.json", None, "config.json is missing"),
        (MANIFEST, "", "manifest.json has other content than was written"),
        (MANIFEST, None, "manifest.json is missing"),
        (MANIFEST, '{"rollmill": "0.1.0"}', "manifest.json has other content than was written"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    folder = made(tmp_path, 1)
    assert find_damage(folder) == []
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert find_damage(folder) == [says]
    with pytest.raises(DamagedCheckpointError, match="step-000001 is damaged: ") as caught:
        manifest.require_whole(folder)
    assert pickle.loads(pickle.dumps(caught.value)).damage == [says]


def test_all_damaged_files_are_named(tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    (folder / "adapter/weights").write_text("wwwv")
    (folder / "config.json").unlink()
    names = ["adapter/weights has other content than was written", "config.json is missing"]
    assert find_damage(folder) == names
    assert find_damage(folder, lambda name: name == "config.json") == names[1:]
    assert find_damage(folder, content=False) == names[1:]


def test_a_flipped_bit_in_a_manifest_is_damage_and_no_later_format(tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"format": 1', '"format": 9'))
    assert find_damage(folder) == ["manifest.json has other content than was written"]


def test_a_later_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    rewritten(made(tmp_path, 1), format=2, rollmill="7.8.9", more={"new": "key"})
    with pytest.raises(CheckpointError) as caught:
        find_damage(Checkpoints(tmp_path).path(1))
    assert not isinstance(caught.value, DamagedCheckpointError)
    for text in ("format 2", "rollmill 7.8.9", f"rollmill {rollmill.__version__}", "formats up to 1"):
        assert text in str(caught.value)


@pytest.mark.parametrize("content", [{}, {"format": 0}, {"format": "1"}])
def test_a_checkpoint_without_a_format_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    folder = made(tmp_path, 1)
    (folder / MANIFEST).unlink()
    (folder / "state.json").write_text(json.dumps({"step": 1} | content))
    (folder / "trainer.pt").touch()
    if content != {"format": "1"}:  # else its manifest is lost
        with pytest.raises(
            CheckpointError, match=r"state\.json has (no )?format.* reads formats up to 1.* move "
        ) as caught:
            Checkpoints(tmp_path).read(1)
        assert not isinstance(caught.value, DamagedCheckpointError)
    with pytest.raises(CheckpointError, match=r"state\.json has (no )?format"):
        read_state(folder)
    [listed] = list_checkpoints(tmp_path)
    assert listed.state == ("damaged" if content == {"format": "1"} else "unreadable")


@pytest.mark.parametrize("state", ["", "[]"])
def test_a_checkpoint_that_lost_its_manifest_and_its_state_is_damaged(tmp_path: Path, state: str) -> None:
    folder = made(tmp_path, 1)
    (folder / MANIFEST).unlink()
    (folder / "state.json").write_text(state)
    (folder / "trainer.pt").touch()
    with pytest.raises(DamagedCheckpointError) as caught:
        Checkpoints(tmp_path).read(1)
    assert caught.value.damage == ["manifest.json is missing"]
    [listed] = list_checkpoints(tmp_path)
    assert (listed.state, listed.format, listed.damage) == ("damaged", None, ["manifest.json is missing"])


def test_manifests_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    for content in ("{}", "[1]", "no JSON"):
        (tmp_path / MANIFEST).write_text(content)
        assert read_manifest(tmp_path) is None
        with verifying(tmp_path):
            pass


def test_damage_explains_an_error_of_loading(tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), verifying(folder):
        raise ZeroDivisionError
    (folder / "adapter/weights").write_text("wwwv")
    with pytest.raises(DamagedCheckpointError) as caught, verifying(folder):
        raise ZeroDivisionError
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(KeyboardInterrupt), verifying(folder):
        raise KeyboardInterrupt


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    folder = made(tmp_path, 1)

    def read() -> None:
        with verifying(folder):
            shutil.rmtree(folder)
            raise FileNotFoundError

    with pytest.raises(CheckpointError, match="was removed while it was read") as caught:
        read()
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_empty_files_that_processes_share_are_read_as_missing_ones(tmp_path: Path) -> None:
    for name in ("machine.json", "trainer.json"):
        (tmp_path / name).write_text("")
    assert read_run_id(tmp_path) is None
    assert read_trainer_status(tmp_path) is None


def test_listing_checkpoints_imports_no_torch() -> None:
    code = "import sys, rollmill.orchestrator.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_damaged_ones_are_moved_aside_and_never_overwrite_each_other(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        made(tmp_path, 4)
        checkpoints.move_aside(4)
    made(tmp_path, 2)
    assert checkpoints.steps() == [2]
    assert [path.name for path in checkpoints.damaged()] == ["damaged-000004", "damaged-000004-2"]
    checkpoints.prune(1, [])
    assert len(checkpoints.damaged()) == 2


def test_settings_of_the_machine_come_from_the_newest_manifest_that_is_whole(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).machine() is None
    made(tmp_path, 1)
    (made(tmp_path, 2) / MANIFEST).write_text("")
    assert Checkpoints(tmp_path).machine() == MACHINE


def test_what_dead_processes_were_writing_is_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    (tmp_path / "rollouts").mkdir()
    dead = tmp_path / f".metrics.jsonl.{ended.pid}@{host}.tmp"
    inside = tmp_path / "rollouts" / f".step-000001.jsonl.{ended.pid}@{host}.tmp"
    folder = tmp_path / f".tokenizer.{ended.pid}@{host}.tmp"
    alive = tmp_path / f".metrics.jsonl.{os.getppid()}@{host}.tmp"
    elsewhere = tmp_path / f".metrics.jsonl.{ended.pid}@elsewhere.tmp"
    foreign = tmp_path / f".metrics.jsonl.{ended.pid}.tmp"
    old = tmp_path / f".old.jsonl.{ended.pid}@elsewhere.tmp"
    folder.mkdir()
    for path in (dead, inside, alive, elsewhere, foreign, old, tmp_path / ".mine.tmp", folder / "tokenizer.json"):
        path.write_text("half")
    os.utime(old, (0, 0))
    os.utime(tmp_path / ".mine.tmp", (0, 0))
    assert set(sweep_temporary(tmp_path)) == {dead, inside, folder, old}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"rollouts", ".mine.tmp", *(each.name for each in (alive, elsewhere, foreign))}


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_that_is_cut_short_leaves_a_name_that_is_swept(tmp_path: Path, durable: bool) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom rollmill import files\n"
        "files.os.replace = lambda *_: os._exit(9)\n"
        f"files.atomic_write(Path(sys.argv[1]), b'new', durable={durable})\n"
    )
    atomic_write(tmp_path / "kept", b"before")
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "kept")]).returncode == 9
    assert (tmp_path / "kept").read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 2
    assert len(sweep_temporary(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
