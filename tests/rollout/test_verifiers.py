"""Environments of the library verifiers, in its own Python, against an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.environment_pools import in_loop

from rollmill.data.verifiers import PYTHON, rows
from rollmill.errors import ConfigError, EpisodeError, TasksetError
from rollmill.rollout.verifiers_process import VerifiersProcessPool
from rollmill.rollout.workflows.verifiers import VerifiersWorkflow
from rollmill.types import Task

ROOT = Path(__file__).resolve().parents[2]
SUMS = str(Path(__file__).parents[1] / "support/verifiers_sums.py")
OWN = ROOT / PYTHON


def needs_verifiers(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that starts the library."""
    absent = pytest.mark.skipif(not OWN.is_file(), reason=f"needs {PYTHON}: make verifiers-setup")
    return pytest.mark.slow(absent(test))


@dataclass
class Server:
    """Where the server is, and what it was asked: key and messages."""

    url: str
    asked: list[tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str], str]], Server]]:
    """Starts a server that replies to the last message as a function says."""
    servers: list[ThreadingHTTPServer] = []

    def start(reply: Callable[[str], str]) -> Server:
        asked: list[tuple[str, list[dict[str, Any]]]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                asked.append((self.headers["authorization"].removeprefix("Bearer "), request["messages"]))
                message = {"role": "assistant", "content": reply(request["messages"][-1]["content"])}
                body = {"id": "1", "object": "chat.completion", "created": 1, "model": request["model"]}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                text = json.dumps(body | {"usage": usage, "choices": [choice]}).encode()
                self.send_response(400 if "x-session-id" in self.headers else 200)  # the key names the session
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        server.request_queue_size = 128  # connections that arrive together are not reset
        server.server_bind()
        server.server_activate()
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Server(f"http://127.0.0.1:{server.server_address[1]}/v1", asked)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@dataclass
class Access:
    """A rollout's endpoint."""

    base_url: str
    api_key: str


class Logged:
    """Stands for the policy: what is logged of a rollout."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def log(self, **numbers: float) -> None:
        self.numbers |= numbers


def config(**keys: Any) -> VerifiersWorkflow:
    return VerifiersWorkflow(**{"taskset": SUMS, "python": OWN, "options": {"size": 4}, "time_limit_s": 60.0, **keys})


def task(index: int) -> Task:
    return Task(f"sums:{index}", "q", metadata={"verifiers": index})


def workflow(pool: VerifiersProcessPool) -> VerifiersWorkflow:
    resources: Any = SimpleNamespace(kept=lambda section, make: pool)
    made = config()
    made.setup(resources)
    return made


async def roll_out(
    pool: VerifiersProcessPool, server: Server, index: int, policy: Any = None
) -> dict[str, float | None]:
    access = Access(server.url, f"sk-run:{index}")
    return await workflow(pool).solve(task(index), policy or Logged(), access)


@needs_verifiers
def test_tasks_are_those_of_the_taskset() -> None:
    found = list(rows(SUMS, size=3, python=str(OWN), options={"size": 7}))
    assert [(row["prompt"], row["verifiers"]) for row in found] == [("0+1=", 0), ("1+1=", 1), ("2+1=", 2)]


@needs_verifiers
@in_loop
async def test_a_taskset_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"verifiers does not load nothing_there: .*'nothing_there' not found"):
        await VerifiersProcessPool(config(taskset="nothing_there")).run({})


@needs_verifiers
@in_loop
async def test_rollouts_of_the_library_against_our_server(serve: Callable[[Callable[[str], str]], Server]) -> None:
    replies = {"1": "wait", "2": "it may be one number or another"}
    server = serve(lambda question: replies.get(question[0], str(int(question[0]) + 1)))
    pool, policy = VerifiersProcessPool(config(restart_after=4)), Logged()

    async def wait_for_asked(index: int) -> None:
        while not [key for key, _ in server.asked if key == f"sk-run:{index}"]:
            await asyncio.sleep(0.02)

    try:
        found = await asyncio.gather(roll_out(pool, server, 0), roll_out(pool, server, 2, policy))
        assert found == [{"right": 2.0, "short": 1.0}, {"right": 0.0, "short": 0.0}]
        assert policy.numbers == {"words": 7.0}
        asked = dict(server.asked)
        assert asked["sk-run:0"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "0+1="}]
        with pytest.raises(EpisodeError, match="verifiers failed on task sums:9: IndexError"):
            await roll_out(pool, server, 9)

        [process] = _processes()
        cancelled = asyncio.ensure_future(roll_out(pool, server, 1))
        await wait_for_asked(1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await roll_out(pool, server, 3) == {"right": 2.0, "short": 1.0}  # the fifth: in another process
        [other] = _processes()
        assert other != process

        server.asked.clear()
        waiting = asyncio.ensure_future(roll_out(pool, server, 1))
        await wait_for_asked(1)
        replies["0"] = "crash"
        for doomed in (roll_out(pool, server, 0), waiting):
            with pytest.raises(EpisodeError, match="the process that runs verifiers has ended"):
                await doomed
    finally:
        await pool.close()
        await pool.close()
    assert not _processes()


def _processes() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):
            if "verifiers_program.py" in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; `make verifiers-setup` creates"):
        list(rows(SUMS, python=str(tmp_path / "python")))

    @in_loop
    async def play() -> None:
        with pytest.raises(ConfigError, match="python does not exist"):
            await VerifiersProcessPool(config(python=tmp_path / "python")).run({})

    play()


@in_loop
async def test_a_task_of_another_set_is_refused() -> None:
    nobody: Any = None
    with pytest.raises(TasksetError, match=r"give taskset.function: rollmill.data.verifiers:rows"):
        await workflow(VerifiersProcessPool(config())).solve(Task("t:1", "q"), nobody, Access("", ""))


@in_loop
async def test_closing_does_not_wait_for_programs_that_have_left_the_process(tmp_path: Path) -> None:
    python, child = tmp_path / "python", tmp_path / "child"
    python.write_text(f"""#!{sys.executable}
import os, subprocess, sys, time
sys.stdin.readline()
with open({str(child)!r}, "w") as file:
    file.write(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
os.write(1, b'{{"id": 0}}\\n')
time.sleep(600)
""")
    python.chmod(0o755)
    pool = VerifiersProcessPool(config(python=python))
    running = asyncio.ensure_future(pool.run({}))
    while not child.exists() or not child.read_text():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    try:
        running.cancel()
        await asyncio.wait_for(pool.close(), 30)
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)
