"""vLLM's process where it does not start, or loses a process: nobody waits for ever, and the error says why.

Needs no vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.vllm import process_tree
from rollmill.engines.vllm.engine import VLLMEngine
from rollmill.engines.vllm.process import VLLMLaunchConfig, VLLMProcess, probe_python
from rollmill.errors import ConfigError, DeadlineError, EngineError, RollmillError


def launch(folder: Path, python: str | Path, deadline_s: float = 60.0) -> VLLMLaunchConfig:
    folder.mkdir()
    settings: dict[str, Any] = {"arguments": {}, "weights": str(folder / "weights"), "folder": str(folder)}
    return VLLMLaunchConfig(Path(python), folder, settings, threads=1, deadline_s=deadline_s)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def started(asked: VLLMLaunchConfig) -> RollmillError:
    async def start() -> None:
        await VLLMProcess.start(asked, lambda message: None, lambda: None)

    with pytest.raises(RollmillError) as caught:
        asyncio.run(start())
    return caught.value


@pytest.mark.skipif("vllm" in sys.modules, reason="this Python has vLLM")
def test_the_error_shows_the_end_of_the_log(tmp_path: Path) -> None:
    error = started(launch(tmp_path / "f", sys.executable))
    assert isinstance(error, EngineError)
    assert "vLLM's process has ended (with exit code 1). The end of its log:" in str(error)
    assert "No module named 'vllm'" in str(error)


def test_a_process_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f"echo $$ > {tmp_path}/pid\nexec sleep 600")
    error = started(launch(tmp_path / "f", python, deadline_s=0.5))
    assert isinstance(error, DeadlineError)
    assert "the engine waited 0 s for vLLM's process to start" in str(error)
    assert "Raise engine.deadline_s" in str(error)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_what_the_process_has_started_ends_with_it(tmp_path: Path) -> None:
    """A grandchild holds the socket open; the end of the child is noticed all the same."""
    python = script(tmp_path / "python", f"sleep 600 & echo $! > {tmp_path}/pid\nsleep 0.2\nexit 3")
    error = started(launch(tmp_path / "f", python))
    assert "(with exit code 3)" in str(error)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_requests_fail_where_the_process_does_not_start(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo there is no memory >&2; exit 1")

    async def generate() -> None:
        engine = VLLMEngine(launch(tmp_path / "f", python), None, eos_ids=frozenset({0}), context=64, checksum="crc32")
        request = GenerationRequest([1, 2], SamplingConfig(), n=2)
        with pytest.raises(EngineError, match="there is no memory"):
            await engine.generate(request)
        with pytest.raises(EngineError, match="takes no more requests"):
            await engine.generate(request)
        await engine.close()

    asyncio.run(generate())
    assert not (tmp_path / "f").exists()


def test_a_python_of_no_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.python: .*/none does not run .*make vllm-setup"):
        probe_python(tmp_path / "none")
    plain = script(tmp_path / "plain", f'exec {sys.executable} -I -S "$@"')
    with pytest.raises(ConfigError, match="cannot import vllm; give a Python that has vLLM"):
        probe_python(plain)
    assert os.access(plain, os.X_OK)


STUCK = """
import json, os, socket, subprocess, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
json.loads(connection.makefile("rb").readline())
core = subprocess.Popen(["VLLM::EngineCore", "600"], executable="/bin/sleep")
other = subprocess.Popen(["compiles", "600"], executable="/bin/sleep")
with open(sys.argv[2], "w") as file:
    file.write(f"{core.pid} {other.pid}")
print("something in the log", flush=True)
connection.sendall(b'{"id": 0, "value": 1}\\n')
time.sleep(600)
"""
"""A process that has started, as vLLM with its subprocesses, and then answers nothing."""


def lost(folder: Path, act: Callable[[int, int, int], None]) -> RollmillError:
    """The error of a pending call after `act` on the ids of process, core and another subprocess."""
    (folder / "stuck.py").write_text(STUCK)
    python = script(folder / "python", f'exec {sys.executable} {folder}/stuck.py "$4" {folder}/pids')

    async def pending() -> RollmillError:
        died = asyncio.Event()
        process, _ = await VLLMProcess.start(launch(folder / "f", python), lambda message: None, died.set)
        core, other = map(int, (folder / "pids").read_text().split())
        call = asyncio.ensure_future(process.request("load"))
        act(process.pid, core, other)
        with pytest.raises(RollmillError) as caught:
            await call
        await died.wait()
        await process.close()
        psutil.wait_procs([psutil.Process(pid) for pid in (core, other) if psutil.pid_exists(pid)], timeout=30)
        assert not any(psutil.pid_exists(pid) for pid in (process.pid, core, other))
        return caught.value

    return asyncio.run(pending())


@pytest.mark.slow
def test_a_lost_subprocess_ends_calls_that_wait_for_it(tmp_path: Path) -> None:
    """vLLM itself answers them never."""
    pids: list[int] = []

    def kill(main: int, core: int, other: int) -> None:
        pids.append(core)
        os.kill(core, signal.SIGKILL)

    error = lost(tmp_path, kill)
    assert isinstance(error, EngineError)
    assert f"was ended, because its EngineCore (process {pids[0]}) has ended. The end of its log:" in str(error)
    assert "something in the log" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_stopped_process_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    monkeypatch.setattr(process_tree, "STOPPED_S", 0.2)
    monkeypatch.setattr(process_tree, "_LOOK_S", 0.1)
    error = lost(tmp_path, lambda *pids: os.kill(pids[which], signal.SIGSTOP))
    assert f"because its {['main process', 'EngineCore'][which]} (process" in str(error)
    assert "is stopped" in str(error)
