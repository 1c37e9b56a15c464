"""Folders of jobs: hostile trees are removed whole, and too much in them is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import lacks

from rollmill_sandbox import Sandbox
from rollmill_sandbox.job_folders import JobFolders, exceeds_disk_limit, remove_tree
from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.root_filesystem import FilesystemView

PATHS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map("/".join), max_size=12)


@given(PATHS, st.lists(st.sampled_from([0o000, 0o300, 0o500, 0o700]), min_size=1))
@settings(max_examples=40)
def test_a_tree_goes_whatever_its_modes(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str], modes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("tree") / "x"
    folder.mkdir()
    for number, path in enumerate(paths):
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / f"file{number}").write_text("x")
    for number, path in enumerate(sorted(paths, reverse=True)):
        (folder / path).chmod(modes[number % len(modes)])
    remove_tree(str(folder))
    assert not folder.exists()


def test_a_tree_too_deep_for_paths_goes_and_counts_as_full(tmp_path: Path) -> None:
    program = "import os\nfor n in range(60):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\nopen('x', 'w').close()"
    (tmp_path / "top").mkdir()
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "top", check=True)
    assert exceeds_disk_limit(str(tmp_path / "top"), os.getpid(), SandboxLimits())
    remove_tree(str(tmp_path / "top"))
    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "top" / "inner").mkdir()
    (tmp_path / "top" / "inner" / "link").symlink_to(tmp_path / "kept")
    remove_tree(str(tmp_path / "top"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_files_count_named_or_not(tmp_path: Path) -> None:
    limits = SandboxLimits(disk_mb=2)
    (tmp_path / "a").write_bytes(os.urandom(1 << 20))
    assert not exceeds_disk_limit(str(tmp_path), os.getpid(), limits)
    with open(tmp_path / "b", "wb") as file:
        file.write(os.urandom(3 << 19))
        file.flush()
        assert exceeds_disk_limit(str(tmp_path), os.getpid(), limits)
        (tmp_path / "b").unlink()
        assert exceeds_disk_limit(str(tmp_path), os.getpid(), limits)
    assert not exceeds_disk_limit(str(tmp_path), os.getpid(), limits)


def test_a_process_that_is_ending_uses_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ending:
        os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOWAIT)  # ended, but still listed: it has no memory to look at
        assert not exceeds_disk_limit(str(tmp_path), ending.pid, SandboxLimits(disk_mb=2))
        (tmp_path / "x").write_bytes(os.urandom(3 << 20))
        assert exceeds_disk_limit(str(tmp_path), ending.pid, SandboxLimits(disk_mb=2))


def test_a_process_without_its_first_thread_is_not_ending(tmp_path: Path) -> None:
    program = """
import ctypes, os, threading
def go_on():
    main.join(0.1)  # seconds until the first thread has ended
    file = open("x", "wb+", buffering=0)
    os.unlink("x")
    file.write(os.urandom(3 << 20))
    print("written", flush=True)
    input()
main = threading.main_thread()
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit, of this thread only
"""
    limits = SandboxLimits(disk_mb=2)
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdin=-1, stdout=-1) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"written\n"
        assert exceeds_disk_limit(str(tmp_path), running.pid, limits)
        deep = tmp_path / "deep"
        deep.mkdir()
        nested = "import os\nfor n in range(60):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
        subprocess.run([sys.executable, "-c", nested], cwd=deep, check=True)
        assert exceeds_disk_limit(str(deep), running.pid, limits)  # it cannot be measured
        running.kill()


def _tree(folder: Path, deep: int, wide: int) -> None:
    program = (
        f"import os\nfor n in range({wide}): os.mkdir(str(n))\nfor n in range({deep}): os.mkdir('d'); os.chdir('d')"
    )
    folder.mkdir()
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


@pytest.mark.parametrize(("deep", "wide"), [(300, 0), (0, 300)])
def test_a_large_tree_is_moved_away_and_swept(deep: int, wide: int) -> None:
    folders = JobFolders(FilesystemView({}, []))
    _tree(Path(folders.of(7)), deep, wide)
    folders.remove(7)
    assert not os.path.exists(folders.of(7))
    assert folders.has_trash()
    folders.sweep()
    assert not folders.has_trash()
    folders.close()
    assert not os.path.exists(folders.base)


def test_a_small_tree_goes_at_once_and_a_full_backlog_makes_jobs_remove_their_own() -> None:
    folders = JobFolders(FilesystemView({}, []))
    _tree(Path(folders.of(1)), 20, 20)
    folders.remove(1)
    assert not folders.has_trash()
    kept = []
    for number in range(20):
        _tree(Path(folders.of(number)), 0, 250)
        folders.remove(number)
        kept.append(len(os.listdir(os.path.join(folders.base, "trash"))))
        assert not os.path.exists(folders.of(number))
    assert max(kept) == 16
    folders.close()
    assert not os.path.exists(folders.base)


@pytest.mark.skipif(bool(lacks("landlock")), reason="no landlock here")
@pytest.mark.parametrize("program", ["os.mkdir('d'); os.chdir('d')", "os.mkdir(str(n))"])
def test_a_large_tree_of_a_program_is_gone_soon(program: str) -> None:
    with Sandbox(backend="landlock") as sandbox:
        around = Path(sandbox.run_sync("import os; print(os.getcwd())").stdout.strip()).parent
        found = sandbox.run_sync(f"import os\nfor n in range(3000): {program}")
        assert found.outcome in ("ok", "error")
        assert sandbox.run_sync("print(1)").stdout == "1\n"
        deadline = time.monotonic() + 60
        while any(around.joinpath("trash").iterdir()) or len(list(around.iterdir())) > 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not around.exists()


DEEP = "for n in range(3000): os.mkdir('d'); os.chdir('d')"
WIDE = "for n in range(1000): os.mkdir(str(n))"
CLOSED = "for n in range(200): os.mkdir(str(n)); os.mkdir(f'{n}/x', 0); open(f'{n}/y', 'w').close()"


@pytest.mark.slow
@pytest.mark.skipif(bool(lacks("landlock")), reason="no landlock here")
@pytest.mark.parametrize("program", [DEEP, WIDE, CLOSED])
@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_of_a_program_remains_after_the_server(program: str, end: str) -> None:
    """Neither if it is killed, as it is while a large tree is being removed for long."""
    with Sandbox(backend="landlock") as sandbox:
        around = Path(sandbox.run_sync("import os; print(os.getcwd())").stdout.strip()).parent
        sandbox.run_sync(f"import os\n{program}")
        if end == "kill":
            pid = sandbox.pid()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    ends = time.monotonic() + 60
    while around.exists():
        assert time.monotonic() < ends
        time.sleep(0.01)
