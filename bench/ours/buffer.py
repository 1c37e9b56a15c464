"""Worker: SqlStore; puts batches in one call and takes them in another."""

from __future__ import annotations

import sqlite3
import sys
import uuid

from bench.peers.buffers import BATCH, GROUP, folder, made, rates
from bench.worker import Channel, serve, versions
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.sql import SqlStore


def main() -> None:
    channel = Channel()
    batches, url = made(int(sys.argv[1])), sys.argv[2]

    def measure() -> dict[str, float]:
        with folder() as path:
            store = SqlStore(Database(url or sqlite_url(path / "b.sqlite")), uuid.uuid4().hex)
            groups = BATCH // GROUP
            found = rates(
                batches,
                store.put,
                lambda number: GROUP * len(store.take(groups, step=number + 1, deadline_s=0)),
            )
            store.rewind(None, step=0)
            store.close()
            return found

    serve(channel, measure, versions=versions("sqlalchemy", "psycopg") | {"sqlite": sqlite3.sqlite_version})


if __name__ == "__main__":
    main()
