"""Standard streams that are missing, and imports without the garbage collector, which is there again afterwards."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.startup import quick_imports


def test_the_collector_is_paused_and_comes_back() -> None:
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_leaves_the_collector_on_while_it_works_and_at_its_end_calls_what_has_to_be_called() -> None:
    text = (
        "import atexit, gc, rollmill, rollmill.cli; atexit.register(lambda: print('end', flush=True));"
        "assert rollmill.Task is not None and gc.isenabled(); rollmill.cli.main(['algorithms']); print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["True", "end"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_open_for_a_command_and_the_processes_that_it_starts(closed: str, tmp_path: Path) -> None:
    ends = """
import json, os, subprocess, sys
os.fstat(int(sys.argv[1]))
print("nobody reads this \u00e9")
print("nor this", file=sys.stderr)
numbers = [os.open(os.devnull, os.O_RDONLY), int(subprocess.check_output(["sh", "-c", "echo 7; echo >&2"]))]
json.dump([sys.stdin.read(), sys.stdout is sys.__stdout__, *numbers], open("found.json", "w"))
"""
    program = f"import sys\nfrom rollmill.startup import open_missing_streams\nopen_missing_streams()\n{ends}"
    for number in "012":
        command = ["sh", "-c", f'exec "$0" -c "$1" {number} {closed}', sys.executable, program]
        subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        read, same, opened, seven = json.loads((tmp_path / "found.json").read_text())
        assert (read, same, seven) == ("", True, 7)
        assert opened > 2


def test_a_current_folder_that_is_gone_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    text = (
        "import os; os.rmdir(os.getcwd()); from rollmill.cli import main; raise SystemExit(main(['check', 'run.yaml']))"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path / "gone", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "the current folder has been removed; change to one that exists\n"


@pytest.mark.parametrize(("inside", "argument"), [("plain", "o\u00fct"), ("na\u00efve", "out")])
def test_paths_that_the_locale_cannot_read_are_refused_with_a_way_out(
    tmp_path: Path, inside: str, argument: str
) -> None:
    (tmp_path / inside).mkdir()
    text = "from rollmill.cli import main; import sys; raise SystemExit(main(sys.argv[1:]))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", text, "algorithms", argument]
    folder = os.fsencode(tmp_path / inside)
    done = subprocess.run(command, cwd=folder, env=os.environ | ascii_only, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the encoding of paths here; set LC_ALL=C.UTF-8, or PYTHONUTF8=1" in done.stderr
    assert "Traceback" not in done.stderr
