"""PostgreSQL that restarts, crashes, hangs or stays away; databases that somebody else holds."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import psutil
import sqlalchemy

from faults.board import fault
from faults.scene import Scene

MET = ("inline/postgresql", "async/postgresql", "processes/postgresql")


def _working(scene: Scene) -> None:
    """Start a run, and wait until it is at work."""
    scene.pace(0.03)
    scene.begin()
    scene.wait(lambda: scene.step() >= 2)
    scene.hit()


def _held_at(scene: Scene, path: str) -> Path:
    held = scene.trap("sql", path, nth=3, do="hold")
    scene.begin()
    return scene.held(held)


@fault("PostgreSQL is restarted", *MET)
def _(scene: Scene) -> None:
    _working(scene)
    scene.services.postgres.stop("fast")
    scene.services.postgres.start()


@fault("PostgreSQL crashes before a commit and recovers", *MET)
def _(scene: Scene) -> None:
    go = _held_at(scene, "insert into rollmill_experiences")
    scene.services.postgres.stop("immediate")
    scene.services.postgres.start()
    go.touch()


@fault("PostgreSQL is away for eight seconds", "inline/postgresql", "async/postgresql")
def _(scene: Scene) -> None:
    _working(scene)
    scene.services.postgres.stop("immediate")
    time.sleep(8)
    scene.services.postgres.start()


@fault("PostgreSQL ends all connections", "inline/postgresql", "async/postgresql", "processes/postgresql")
def _(scene: Scene) -> None:
    go = _held_at(scene, "insert into rollmill_experiences")
    engine = sqlalchemy.create_engine(scene.services.postgres.url)
    with engine.connect() as connection:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        connection.exec_driver_sql(f"{others} AND backend_type = 'client backend'")
    engine.dispose()
    go.touch()


def _servers(scene: Scene) -> list[int]:
    folder = str(scene.services.postgres.folder)
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "postgres" and folder in " ".join(process.info["cmdline"] or []):
            found += [process.pid, *(child.pid for child in process.children(recursive=True))]
    return found


@fault("PostgreSQL is stopped for six seconds", "inline/postgresql", "async/postgresql")
def _(scene: Scene) -> None:
    _working(scene)
    with scene.stopped(*_servers(scene)):
        time.sleep(6)


@fault("a table is locked by somebody else for four seconds", "inline/postgresql")
def _(scene: Scene) -> None:
    _working(scene)
    engine = sqlalchemy.create_engine(scene.services.postgres.url)
    with engine.begin() as connection:
        [table] = [each for each in sqlalchemy.inspect(engine).get_table_names() if each.endswith("experiences")]
        connection.exec_driver_sql(f'LOCK TABLE "{table}" IN ACCESS EXCLUSIVE MODE')
        time.sleep(4)
    engine.dispose()


@fault(
    "PostgreSQL stays away",
    "inline/postgresql",
    promise="diagnosed",
    names=("the buffer's database", "check that the server runs", "rollmill resume"),
    deadline_s=150,
)
def _(scene: Scene) -> None:
    server = scene.services.postgres
    scene.changes["supervise"] = {"restarts": 0}  # each try would wait as long
    _working(scene)
    server.stop("immediate")
    scene.cleanup.callback(server.start)


@fault("buffer.sqlite is locked for five seconds", "inline/sqlite", "async/sqlite", "processes/sqlite")
def _(scene: Scene) -> None:
    _working(scene)
    with sqlite3.connect(scene.out / "buffer.sqlite", isolation_level=None, timeout=30) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(5)
        database.execute("ROLLBACK")
    database.close()


@fault(
    "buffer.sqlite stays locked",
    "inline/sqlite",
    promise="diagnosed",
    names=("buffer.sqlite", "locked", "holds it"),
    deadline_s=150,
)
def _(scene: Scene) -> None:
    scene.changes["supervise"] = {"restarts": 0}  # each try would wait as long
    _working(scene)
    code = (
        "import sqlite3, sys, time\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)\n"
        "database.execute('BEGIN EXCLUSIVE')\nprint(flush=True)\ntime.sleep(600)\n"
    )
    holder = subprocess.Popen(["python3", "-c", code, str(scene.out / "buffer.sqlite")], stdout=subprocess.PIPE)
    scene.cleanup.callback(holder.wait)
    scene.cleanup.callback(holder.kill)
    assert holder.stdout is not None
    holder.stdout.readline()


@fault("another program adds to the database meanwhile", "inline/sqlite", "async/sqlite")
def _(scene: Scene) -> None:
    """A reader with a long transaction, such as `rollmill buffer ls | less`."""
    _working(scene)
    database = sqlite3.connect(scene.out / "buffer.sqlite", check_same_thread=False)
    database.execute("BEGIN")
    database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    threading.Timer(3, database.close).start()
