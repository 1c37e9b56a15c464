"""vLLM's process where it does not start: nobody waits for ever, and the error says why. Needs no vLLM."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
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
