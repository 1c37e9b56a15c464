"""Names of the open sessions of a server that trains, so that clients are told when it has lost them.

Calls of an open session are in memory only. If the process ends, the next one finds their names in a file of the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from rollmill.errors import CorruptFileError
from rollmill.files import atomic_write

SESSIONS_FILE = "sessions.jsonl"
_SPARE_LINES = 10_000
_Key = tuple[str, str]


class SessionJournal:
    """The names of open sessions, by client, in a file that gets a line for each that begins or ends.

    Attributes:
        lost: sessions that were open when another process ended, until their clients are told.
    """

    def __init__(self, path: Path) -> None:
        """Raises CorruptFileError if a line in the middle of the file is damaged."""
        self._path, self.lost = path, _open_sessions(path)
        self._open = set(self.lost)
        self._lines = 0
        self._file = self._rewritten()

    def opened(self, key: _Key) -> None:
        self._open.add(key)
        self._write("opened", key)

    def closed(self, key: _Key) -> None:
        """Note the end of a session; nothing for one that was not noted."""
        if key in self._open:
            self._open.remove(key)
            self._write("closed", key)

    def was_lost(self, key: _Key) -> bool:
        """True once for a session that was lost: its client may use the name again."""
        if key not in self.lost:
            return False
        self.lost.remove(key)
        self.closed(key)
        return True

    def close(self) -> None:
        self._file.close()

    def _write(self, what: str, key: _Key) -> None:
        self._file.write(_line(what, key))
        self._file.flush()
        self._lines += 1
        if self._lines > _SPARE_LINES + 2 * len(self._open):
            self._file.close()
            self._file = self._rewritten()

    def _rewritten(self) -> IO[str]:
        """Replace the file by one of the open sessions only, and return it."""
        atomic_write(self._path, "".join(_line("opened", key) for key in sorted(self._open)).encode())
        self._lines = len(self._open)
        return self._path.open("a")


def _open_sessions(path: Path) -> set[_Key]:
    found: set[_Key] = set()
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            what, client, name = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # it was being written when the process ended
            raise CorruptFileError(f"{path}:{number} is damaged; remove the file") from error
        (found.add if what == "opened" else found.discard)((client, name))
    return found


def _line(what: str, key: _Key) -> str:
    return json.dumps([what, *key]) + "\n"
