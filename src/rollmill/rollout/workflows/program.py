"""Workflow `program`: runs programs that use the policy through the explorer's endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from rollmill.config.workflows import ProgramWorkflow
from rollmill.data.content_parts import sendable_prompt
from rollmill.errors import WorkflowError
from rollmill.files import to_jsonable
from rollmill.rollout.policy import Policy
from rollmill.rollout.workflow import EndpointAccess, RolloutScorer, WorkflowResult
from rollmill.types import Task

_TASK = "ROLLMILL_TASK"
_LONGEST_VARIABLE = 100_000  # bytes; Linux takes no more than 128 KiB
_MOST_PRINTED = 1 << 20
_TAIL = 2000


class ProgramRunner:
    """Runs the program of a section, with a limit on concurrent runs."""

    def __init__(self, config: ProgramWorkflow) -> None:
        self._config, self._places = config, asyncio.Semaphore(config.at_once)

    async def __call__(
        self, task: Task, policy: Policy, endpoint: EndpointAccess, judge: RolloutScorer
    ) -> WorkflowResult:
        """Run the program once.

        Raises:
            WorkflowError: it failed, took too long, printed too much or never called the policy.
        """
        config = self._config
        async with self._places:
            printed = await _run(config, task, endpoint)
        if not endpoint.called:
            raise WorkflowError(
                f"{_named(config, task)} never asked the policy; let it use OPENAI_BASE_URL and OPENAI_API_KEY "
                "(or ANTHROPIC_...)"
            )
        if config.rewarded_by == "feedback":
            return dict(endpoint.rewards) or None
        return await judge(printed)


async def _run(config: ProgramWorkflow, task: Task, endpoint: EndpointAccess) -> str:
    """Run the program and return its output."""
    payload = json.dumps(_task_json(config, task))
    command = [sys.executable if config.command[0] == "python" else config.command[0], *config.command[1:]]
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=config.folder,
            env=_environment(config, payload, endpoint),
            start_new_session=True,
        )
    except OSError as error:
        raise WorkflowError(f"{_named(config, task)} cannot be started: {error}; correct workflow.command") from error
    try:
        async with asyncio.timeout(config.time_limit_s):
            (printed, whole), (errors, _), _ = await asyncio.gather(
                _read(process.stdout), _read(process.stderr), _tell(process.stdin, payload.encode())
            )
            code = await process.wait()
    except TimeoutError:
        text = f"{_named(config, task)} took longer than {config.time_limit_s:g} s"
        raise WorkflowError(f"{text}; raise workflow.time_limit_s, or let it end sooner") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its subprocesses, too
        process._transport.close()  # type: ignore[attr-defined]  # unread output would keep it from ending
        await process.wait()
    if code != 0:
        tail = errors.decode("utf-8", "replace")[-_TAIL:].strip()
        raise WorkflowError(f"{_named(config, task)} ended with exit code {code}: {tail or 'it printed no error'}")
    if not whole:
        raise WorkflowError(f"{_named(config, task)} printed more than {_MOST_PRINTED} bytes; let it print its answer")
    return printed.decode("utf-8", "replace").strip()


def _task_json(config: ProgramWorkflow, task: Task) -> dict[str, Any]:
    fields = {"id": task.id, "prompt": sendable_prompt(task), "metadata": task.metadata}
    payload: dict[str, Any] = to_jsonable(fields | ({"answer": task.answer} if config.show_answer else {}))
    return payload


def _environment(config: ProgramWorkflow, payload: str, endpoint: EndpointAccess) -> dict[str, str]:
    variables = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.address,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine
        variables[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    inherited = {key: value for key, value in os.environ.items() if key != _TASK}
    if len(payload.encode()) <= _LONGEST_VARIABLE:
        variables[_TASK] = payload
    return inherited | variables | config.environment


async def _read(stream: asyncio.StreamReader | None) -> tuple[bytes, bool]:
    """Read up to the limit; also return whether that was everything. The rest is discarded: a full pipe would block."""
    assert stream is not None
    found, whole = bytearray(), True
    while part := await stream.read(1 << 16):
        room = _MOST_PRINTED - len(found)
        found += part[:room]
        whole = whole and len(part) <= room
    return bytes(found), whole


async def _tell(stream: asyncio.StreamWriter | None, text: bytes) -> None:
    assert stream is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it need not read its task
        stream.write(text)
        await stream.drain()
        stream.close()


def _named(config: ProgramWorkflow, task: Task) -> str:
    return f"task {task.id}: workflow `program`: `{' '.join(config.command)}`"
