"""A private PostgreSQL server: a cluster in a temporary folder, reached by a Unix socket in it.

`python tests/support/postgres.py` starts one and prints its URL; Ctrl-C ends it and removes it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

INSTALL = "apt-get install -y postgresql"
_USER = "postgres"


class Postgres:
    """A server of its own. Root starts it as the user that the package made, since PostgreSQL refuses to be root."""

    def __init__(self) -> None:
        programs = _programs()
        assert programs is not None, "call `missing` first"
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="rollmill-pg-", dir="/tmp"))  # a socket's path has to be short
        if os.getuid() == 0:
            shutil.chown(self.folder, _USER, _USER)
        self._data = self.folder / "data"
        self._run(
            "initdb", "--pgdata", str(self._data), "--auth", "trust", "--username", "rollmill", "--encoding", "UTF8"
        )

    @property
    def url(self) -> str:
        """SQLAlchemy URL of its database."""
        return f"postgresql+psycopg://rollmill@/postgres?host={self.folder}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = f"-c listen_addresses='' -k {self.folder}"
        self._run("pg_ctl", "start", "-w", "-D", str(self._data), "-l", str(self.folder / "log"), "-o", options)

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate` is a crash: it recovers at the next start."""
        self._run("pg_ctl", "stop", "-w", "-D", str(self._data), "-m", mode)

    def remove(self) -> None:
        """Stop it if it runs, and remove its files."""
        if (self._data / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", _USER, "--", *command]
        log = self.folder / f"{program}.out"  # a pipe would stay open as long as the server runs
        with log.open("a") as out:
            ended = subprocess.run(command, stdout=out, stderr=out, cwd="/", timeout=120)
        assert ended.returncode == 0, f"{' '.join(command)} failed:\n{log.read_text()}"


def missing() -> str | None:
    """Why no server can be started here; None where it can."""
    if _programs() is None:
        return f"PostgreSQL is not installed: {INSTALL}"
    if os.getuid() == 0:
        try:
            pwd.getpwnam(_USER)
        except KeyError:
            return f"there is no user {_USER} to run PostgreSQL as: {INSTALL}"
    return None


def _programs() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    found = shutil.which("initdb")
    return folders[-1] if folders else Path(found).parent if found else None


def main() -> int:
    """Run one until Ctrl-C."""
    if (reason := missing()) is not None:
        print(reason, file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    server = Postgres()
    try:
        server.start()
        print(server.url, flush=True)
        signal.pause()
    except KeyboardInterrupt:
        return 0
    finally:
        server.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
