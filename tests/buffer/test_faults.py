"""Writers and readers that are killed, a database that restarts, a disk that is full: nothing lost, nothing twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.postgres import Postgres
from support.sources import PYTHONPATH

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KILLS = 100
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHONPATH, str(ROOT / "tests")])}

FULL = """
import shutil, sys
from pathlib import Path
from support.buffer_groups import group, ids, same_groups
from rollmill.buffer.base import ExperienceKind
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.sql import SqlStore
from rollmill.errors import StoreError

folder = Path(sys.argv[1])
ballast = folder / "ballast"
ballast.write_bytes(bytes(2 << 20))
open_store = lambda: SqlStore(Database(sqlite_url(folder / "b.sqlite")), "run")
store, written = open_store(), []
store.put([group("g0"), group("g1")])
store.take(1, step=1, deadline_s=0)
written = ["g0", "g1"]
try:
    while True:
        batch = [group(f"g{len(written) + i}", rewards=(1.0,) * 40) for i in range(5)]
        store.put(batch)
        written += ids(batch)
except StoreError as error:
    print(error)
assert shutil.disk_usage(folder).free < 1 << 20, "it is full"
for again in range(2):  # what is there can be read, before and after a restart
    assert [each.id for _, each in store.read(ExperienceKind.ROLLOUT)] == written
    if again == 0:
        store.close()
        ballast.unlink()
        store = open_store()
assert store.put(batch) == len(batch)
assert store.waiting() == len(written) + len(batch) - 1
assert ids(store.take(3, step=2, deadline_s=0)) == written[1:4]
print("goes on")
"""


def run_workers(url: str, folder: Path, *, kills: int, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE.parent / "support/buffer_workers.py"), url, f"run-{seed}-{os.urandom(4).hex()}"]
    return subprocess.Popen(
        [*command, str(folder), str(kills), str(seed)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )


def check(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Every group was learned from once or waits, in the surviving lineage."""
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    assert found["codes"] == {"writer": 0, "reader": 0}, found["logs"]
    learned, written = found["learned"], found["written"]
    assert len(set(learned)) == len(learned), "learned from twice"
    assert written == list(range(len(written))), "lost or doubled"
    assert set(learned) <= set(written)
    assert found["taken"] == len(learned), "taken and not learned from"
    assert found["replayed"]
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_a_hundred_kills_on_sqlite(tmp_path: Path) -> None:
    found = check(run_workers(f"sqlite:///{tmp_path / 'b.sqlite'}", tmp_path, kills=KILLS, seed=1))
    assert sum(found["killed"].values()) == KILLS
    assert min(found["killed"].values()) > 30


@pytest.mark.service
@pytest.mark.parametrize("kills", [20, pytest.param(KILLS, marks=pytest.mark.thorough)])
def test_kills_on_postgresql(pg: Postgres, tmp_path: Path, kills: int) -> None:
    found = check(run_workers(pg.url, tmp_path, kills=kills, seed=2))
    assert sum(found["killed"].values()) == kills
    assert min(found["killed"].values()) > 0.3 * kills


@pytest.mark.slow
def test_a_few_kills_on_sqlite(tmp_path: Path) -> None:
    check(run_workers(f"sqlite:///{tmp_path / 'b.sqlite'}", tmp_path, kills=6, seed=3))


@pytest.mark.service
def test_the_server_crashes_while_both_are_at_work(pg: Postgres, tmp_path: Path) -> None:
    process = run_workers(pg.url, tmp_path, kills=0, seed=4)
    for _ in range(4):
        time.sleep(0.7)
        assert process.poll() is None
        pg.stop("immediate")
        time.sleep(0.2)
        pg.start()
    (tmp_path / "end").touch()
    assert len(check(process)["learned"]) > 0


def test_a_full_disk_damages_nothing(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=6m tmpfs {disk}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here (needs root)")
    command = ["unshare", "-m", "sh", "-c", f"{mount} && exec {sys.executable} {script} {disk}"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    first, last = ended.stdout.splitlines()
    assert "b.sqlite failed: database or disk is full; free some space; nothing that was written before" in first
    assert last == "goes on"
