"""The `plain` backend: an ordinary process with limits. It isolates nothing, and every Result of it says so."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rollmill.sandbox.limits import Result
from rollmill.sandbox.process import environment, python
from rollmill.sandbox.program import run_program, set_limits
from rollmill.sandbox.supervisor import Watched, watch
from rollmill.sandbox.wire import Job, pack_ending, result_of, unsafe


def run_plain(job: Job, folders: Sequence[str]) -> Result:
    """Run a job as this user, in a folder of its own. `folders` are added to where it finds packages.

    It can read and write what this user can, and use the network; `disk_mb` limits each file, `processes` nothing.
    """
    with tempfile.TemporaryDirectory(prefix="rollmill-plain-", ignore_cleanup_errors=True) as folder:
        inside = Path(folder, "work")
        for name, content in {".": b"", **job.files}.items():
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            if name != ".":
                (inside / name).write_bytes(content)
        inside.mkdir(exist_ok=True)
        Path(folder, "stdin").write_bytes(job.stdin)
        Path(folder, "job").write_bytes(pickle.dumps((job.program, job.limits, list(folders))))
        with open(Path(folder, "stdin"), "rb") as stdin:
            popen = subprocess.Popen(
                [*python("from rollmill.sandbox.plain import child; child()"), str(Path(folder, "job"))],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment() | {"HOME": str(inside), "TMPDIR": str(inside)},
                cwd=inside,
                start_new_session=True,
            )
        assert popen.stdout is not None
        assert popen.stderr is not None
        watched = Watched(popen.pid, popen.stdout.fileno(), popen.stderr.fileno())
        with popen.stdout, popen.stderr:
            ending = watch(watched, job.limits, lambda: _kill_group(popen.pid), reaps=popen.pid)
        popen.returncode = ending.exit_code  # watch has waited for it
    result = result_of(pack_ending(ending))
    assert result is not None
    return unsafe(result)


def child() -> NoReturn:
    """The program of the process: its argument is the file that holds the job."""
    program, limits, folders = pickle.loads(Path(sys.argv[1]).read_bytes())
    sys.path.extend(folders)
    set_limits(limits, supervisors=0)
    run_program(program)


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
