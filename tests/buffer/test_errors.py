"""What a database can refuse, and what is said then; and stores from run files."""

from __future__ import annotations

import builtins
import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from support.buffer_groups import group, ids, same_groups
from support.postgres import Postgres
from support.waiting import wait_until

from rollmill.buffer import open_run_store, open_store
from rollmill.buffer.base import FEEDBACK, PIPELINE, ExperienceKind
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.offline_data import StoreReader
from rollmill.buffer.sql import SqlStore
from rollmill.config.buffer import BufferConfig, ReplayConfig
from rollmill.errors import ConfigError, StoreError


def sqlite(path: Path, **options: Any) -> SqlStore:
    return SqlStore(Database(sqlite_url(path), **options), "run")


@pytest.mark.parametrize(
    ("store", "persistent", "url", "kind"),
    [
        ("auto", False, None, MemoryStore),
        ("auto", True, None, SqlStore),
        ("auto", False, "sqlite:///{}/x.sqlite", SqlStore),
        ("memory", True, None, MemoryStore),
        ("sql", False, None, SqlStore),
    ],
)
def test_a_run_file_chooses_the_store(
    store: Any, persistent: bool, url: str | None, kind: type, tmp_path: Path
) -> None:
    config = BufferConfig(store=store, url=url and url.format(tmp_path), replay=ReplayConfig(groups=1))
    made = open_store(config, run_dir=tmp_path, run_id="ab", persistent=persistent)
    assert type(made) is kind
    made.close()
    expected = [] if kind is MemoryStore else ["x.sqlite"] if url else ["buffer.sqlite"]
    assert [path.name for path in tmp_path.iterdir()] == expected


def test_two_runs_in_one_database_do_not_meet(url: str) -> None:
    one, other = SqlStore(Database(url), f"one of {url}"), SqlStore(Database(url), f"other of {url}")
    one.put([group("g0", rewards=(0.25,))])
    other.put([group("g0", rewards=(0.75,)), group("g1")])
    mark = other.mark()
    assert (one.waiting(), other.waiting()) == (1, 2)
    assert same_groups(one.take(1, step=1, deadline_s=0), [group("g0", rewards=(0.25,))])
    one.rewind(None, step=0)
    assert (one.waiting(), other.waiting()) == (0, 2)
    other.rewind(mark, step=0)
    assert other.waiting() == 2
    for each in (one, other):
        each.rewind(None, step=0)
        each.close()


def test_a_run_directory_is_opened_by_its_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(no config.yaml\)"):
        open_run_store(tmp_path)
    (tmp_path / "config.yaml").write_text("stages: [{buffer: {store: auto}}, {}]\n")
    with pytest.raises(ConfigError, match=r"has no buffer.sqlite.*rollmill show"):
        open_run_store(tmp_path)
    sqlite(tmp_path / "buffer.sqlite").put([group("g0")])
    with pytest.raises(StoreError, match="does not say the run's id"):
        open_run_store(tmp_path)
    (tmp_path / "machine.json").write_text(json.dumps({"run_id": "other"}))
    with pytest.raises(StoreError, match=r"holds nothing of this run \(its id is other\)"):
        open_run_store(tmp_path)
    (tmp_path / "machine.json").write_text(json.dumps({"run_id": "run"}))
    found = open_run_store(tmp_path)
    assert found.waiting() == 1
    with pytest.raises(StoreError, match=r"readonly database; it can be read but not written"):
        found.remove(["g0"], by="me")
    found.close()
    (tmp_path / "config.yaml").write_text(f"stages: [{{}}, {{buffer: {{url: 'sqlite:///{tmp_path}/else.sqlite'}}}}]\n")
    with pytest.raises(StoreError, match=r"else.sqlite failed: unable to open"):
        open_run_store(tmp_path)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("nonsense", "buffer.url is no SQLAlchemy URL; write it like postgresql"),
        ("mysql://host/name", "mysql is not supported; use sqlite or postgresql"),
        ("sqlite://", "a SQLite database needs a file"),
        (
            "sqlite:////no/such/folder/x.sqlite",
            "/no/such/folder/x.sqlite failed: unable to open.*check that the folder",
        ),
    ],
)
def test_a_wrong_url_says_what_to_do(url: str, what: str) -> None:
    with pytest.raises(StoreError, match=what):
        Database(url)


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name == "psycopg":
            raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")
        return real(name, *arguments)

    monkeypatch.delitem(sys.modules, "psycopg", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(StoreError, match=r"needs the package `psycopg`: pip install 'rollmill\[postgres\]'"):
        Database("postgresql+psycopg://me:secret@localhost/x")


def test_an_unreachable_server_is_an_error_without_the_password() -> None:
    with pytest.raises(StoreError, match=r"failed for 0 s: .*check that the server runs") as found:
        Database("postgresql+psycopg://me:secret@127.0.0.1:1/x", outage_s=0.3)
    assert "secret" not in str(found.value)


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    path.write_bytes(b"It was a dark and stormy night" * 100)
    with pytest.raises(StoreError, match="file is not a database; the file is damaged or is something else"):
        sqlite(path)
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE mine (a)").connection.close()
    with pytest.raises(StoreError, match="holds no buffer of rollmill"):
        sqlite(path, read_only=True)


def test_a_damaged_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    store = sqlite(path)
    store.put([group(f"g{i}") for i in range(300)])
    store.close()
    content = bytearray(path.read_bytes())
    content[len(content) // 4 :] = os.urandom(len(content) - len(content) // 4)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"malformed|damaged"):
        list(sqlite(path).read(ExperienceKind.ROLLOUT))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE rollmill_experiences SET body = substr(body, 1, 20)",
        "UPDATE rollmill_experiences SET body = '[]'",
        "UPDATE rollmill_experiences SET logprobs = substr(logprobs, 5)",
        "UPDATE rollmill_experiences SET versions = substr(versions, 9)",
        "UPDATE rollmill_experiences SET lengths = substr(lengths, 5)",
        "DELETE FROM rollmill_experiences",
    ],
)
def test_a_damaged_row_is_noticed(tmp_path: Path, damage: str) -> None:
    store = sqlite(tmp_path / "b.sqlite")
    store.put([group("g0")])
    change = text(damage)
    store.database.write(lambda connection: connection.execute(change))
    with pytest.raises(StoreError, match=r"groups 1 to 1 of the buffer .*b.sqlite are damaged"):
        list(store.read(ExperienceKind.ROLLOUT))


def test_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    path = tmp_path / "50% of?what#x.sqlite"
    sqlite(path).put([group("g0")])
    found = sqlite(path, read_only=True)
    assert found.waiting() == 1
    assert str(found.database) == str(path)


@pytest.mark.parametrize(("found", "what"), [("2", "install the rollmill that wrote it"), ("0", "export it with the")])
def test_another_format_is_refused(url: str, found: str, what: str) -> None:
    database = Database(url)
    change = text("UPDATE rollmill_meta SET value = :value WHERE key = 'format'")
    database.write(lambda connection: connection.execute(change, {"value": found}))
    try:
        with pytest.raises(StoreError, match=rf"has format {found}, this rollmill reads 1; {what}"):
            Database(url)
    finally:
        database.write(lambda connection: connection.execute(change, {"value": "1"}))
        database.close()


def test_a_locked_file_is_waited_for_then_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.buffer.database.BUSY_S", 0.1)
    path = tmp_path / "b.sqlite"
    store = sqlite(path, outage_s=0.3)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="database is locked; another process holds it"):
        store.put([group("g0")])
    holder.execute("ROLLBACK")
    holder.close()
    assert store.put([group("g0")]) == 1


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everything")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match=r"unable to open|readonly"):
        sqlite(tmp_path / "b.sqlite")


def test_a_database_older_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    store = sqlite(tmp_path / "b.sqlite")
    store.put([group("g0")])
    with pytest.raises(StoreError, match="has seen 1 groups of this run, its checkpoint 2; put the database back"):
        store.rewind({"store": "sql", "last": 2}, step=1)


@pytest.mark.service
def test_a_restart_of_the_server_is_ridden_out(pg: Postgres) -> None:
    store = SqlStore(Database(pg.url, outage_s=60), "restarted")
    store.put([group("g0"), group("g1")])
    pg.stop("immediate")
    pg.start()
    assert ids(store.take(1, step=1, deadline_s=5)) == ["g0"]
    pg.stop("immediate")
    pg.start()
    assert store.put([group("g2")]) == 1
    assert store.waiting() == 2
    store.close()


@pytest.mark.service
def test_a_server_that_is_stopped_is_an_error(pg: Postgres) -> None:
    """Its connections stay open, and nothing comes through them."""
    store = SqlStore(Database(pg.url, outage_s=1), "stopped")
    store.put([group("g0")])
    server = psutil.Process(int((pg.folder / "data/postmaster.pid").read_text().split()[0]))
    processes = [server, *server.children(recursive=True)]
    for each in processes:
        each.suspend()
    try:
        with pytest.raises(StoreError, match=r"failed for 1 s: .*; check that the server runs"):
            store.put([group("g1")])
    finally:
        for each in processes:
            each.resume()
    assert store.put([group("g2")]) == 1
    store.close()


@pytest.mark.service
def test_a_server_ends_what_takes_too_long_by_itself(pg: Postgres) -> None:
    """Its locks would keep others out if the process that waits for it were stopped, and could not end it."""
    limited, watching = Database(pg.url, outage_s=0.2), Database(pg.url)
    with limited.engine.connect() as connection, pytest.raises(DBAPIError, match="statement timeout"):
        connection.execute(text("select pg_sleep(20)"))
    with limited.engine.connect() as connection:
        pid = connection.execute(text("select pg_backend_pid()")).scalar_one()  # and then nothing, in a transaction
        there = text("select pid from pg_stat_activity where pid = :pid")
        wait_until(lambda: not watching.read(lambda other: other.execute(there, {"pid": pid}).all()))
        connection.invalidate()
    for each in (limited, watching):
        each.close()


@pytest.mark.service
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("/postgres", "/nothing"), "make the database first"),
        (("rollmill@", "nobody@"), "check the user|make the database"),
    ],
)
def test_what_a_server_refuses(pg: Postgres, change: tuple[str, str], what: str) -> None:
    with pytest.raises(StoreError, match=what):
        Database(pg.url.replace(*change), outage_s=1)


def test_redone_feedback_is_found_by_who_went_past_it(url: str) -> None:
    store = SqlStore(Database(url), f"redone in {url}")
    kept = [group(name, kind=ExperienceKind.RATED, writer=FEEDBACK) for name in ("a", "b")]
    store.put([group("made", kind=ExperienceKind.RATED, writer=PIPELINE), *kept])
    store.remove(["a", "made"], by="Ann")
    reader = StoreReader("it", lambda: store)
    assert ids(list(reader.new(ExperienceKind.RATED))) == ["b"]
    mark = store.mark()
    store.restore(["a", "made", "b"])
    assert same_groups(list(reader.new(ExperienceKind.RATED)), kept[:1])
    assert store.put([group("c")]) == 1
    store.rewind(mark, step=0)
    assert [each.id for _, each in store.read(ExperienceKind.RATED)] == ["made", "b", "a"], (
        "only what was put after the mark goes"
    )
    store.close()


def test_groups_that_are_deleted_meanwhile_are_left_out(tmp_path: Path) -> None:
    store = sqlite(tmp_path / "b.sqlite")
    store.put([group(f"g{i}") for i in range(3)])
    store.change(lambda rows, _: rows.delete([2]))
    assert ids(store.groups([1, 2, 3])) == ["g0", "g2"]


def test_damaged_files_of_a_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "buffer.sqlite").touch()
    (tmp_path / "machine.json").write_text('{"run_id"')
    with pytest.raises(StoreError, match=r"machine.json does not say the run's id"):
        open_run_store(tmp_path)
    for text_ in ("a: [", "- 1\n"):
        (tmp_path / "config.yaml").write_text(text_)
        with pytest.raises(ConfigError, match=r"config.yaml is damaged"):
            open_run_store(tmp_path)
