"""Workflow `program`: runs programs that use the policy through the explorer's endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.workflows import WorkflowSection
from rollmill.errors import WorkflowError
from rollmill.files import to_jsonable
from rollmill.types import SEALED, Task

if TYPE_CHECKING:
    from rollmill.config.run import StageConfig
    from rollmill.rollout.containers import Container
    from rollmill.rollout.policy import Policy
    from rollmill.rollout.resources import WorkflowResources
    from rollmill.rollout.workflow import EndpointAccess, RolloutScorer, WorkflowResult

_TASK = "ROLLMILL_TASK"
_LONGEST_VARIABLE = 100_000  # bytes; Linux takes no more than 128 KiB
_MOST_PRINTED = 1 << 20
_TAIL = 2000


class ProgramWorkflow(WorkflowSection):
    """Starts a program once per rollout that calls the policy through an OpenAI-compatible endpoint (extra `serve`).

    The environment variables OPENAI_BASE_URL and OPENAI_API_KEY are set as OpenAI's clients expect, and
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY as Anthropic's do. The task is passed as JSON on stdin and in
    ROLLMILL_TASK. The program's output is its answer.
    """

    needs_extra = ("serve", "uvicorn")

    multi_step: ClassVar[bool] = True

    name: Literal["program"] = "program"
    command: list[str] = Field(min_length=1)
    """The program and its arguments; `python` is the Python that runs rollmill."""
    folder: Path = Path()
    """Working directory of the program."""
    environment: dict[str, str] = {}
    """Environment variables of the program, in addition to those of this process."""
    inside: bool = False
    """Run the program in the rollout's container (`environment: container`, with `network: host`, by which it reaches
    the endpoint). Otherwise it runs on this machine; if there is a container, ROLLMILL_CONTAINER is its id, and
    DOCKER_HOST the engine that it is of."""
    time_limit_s: float = Field(300.0, gt=0)
    """Timeout of the program; the rollout then fails."""
    at_once: int = Field(8, ge=1)
    """Maximum number of concurrent programs."""
    rewarded_by: Literal["rewards", "feedback"] = "rewards"
    """Source of the reward: `rewards`, which score the program's output, or `feedback` posted to /feedback (by the
    program itself, or a verifier it starts)."""
    own_sampling: bool = True
    """Whether the program may choose temperature, top_p, top_k, min_p, penalties and biases; false: always those of
    `rollout`. Greedy replies are not trained on."""
    show_answer: bool = False
    """Include the task's answer in the task passed to the program."""
    _places: asyncio.Semaphore = PrivateAttr()

    @property
    def scored_by_rewards(self) -> bool:
        """True if `rewards` score the program's output."""
        return self.rewarded_by == "rewards"

    @property
    def forces_sampling(self) -> bool:
        return not self.own_sampling

    def setup(self, resources: WorkflowResources) -> None:
        self._places = asyncio.Semaphore(self.at_once)

    def takes(self, part: str) -> bool:
        return super().takes(part) or (part == "container" and self.inside)

    def unused_keys(self) -> dict[str, str]:
        text = "not honoured with inside: the folder is environment.folder, in the container; remove it"
        return {"folder": text} if self.inside else {}

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        if self.inside and getattr(stage.environment, "network", None) != "host":
            yield "inside", "it needs environment: {name: container, network: host, ...}, or it reaches no endpoint"

    async def solve(
        self,
        task: Task,
        policy: Policy,
        endpoint: EndpointAccess,
        judge: RolloutScorer,
        container: Container | None = None,
    ) -> WorkflowResult:
        """Run the program once.

        Raises:
            WorkflowError: it failed, took too long, printed too much or never called the policy.
        """
        async with self._places:
            printed = await self._run(task, endpoint, container)
        if not endpoint.called:
            raise WorkflowError(
                f"{self._named(task)} never asked the policy; let it use OPENAI_BASE_URL and OPENAI_API_KEY "
                "(or ANTHROPIC_...)"
            )
        if self.rewarded_by == "feedback":
            return dict(endpoint.rewards) or None
        return await judge(printed)

    async def _run(self, task: Task, endpoint: EndpointAccess, container: Container | None) -> str:
        """Run the program and return its output."""
        from rollmill.data.content_parts import sendable_prompt

        told = {key: value for key, value in task.metadata.items() if key != SEALED}
        fields = {"id": task.id, "prompt": sendable_prompt(task), "metadata": told}
        payload = json.dumps(to_jsonable(fields | ({"answer": task.answer} if self.show_answer else {})))
        if self.inside:
            assert container is not None, "checks refuse this without an environment `container`"
            ended = await container.exec(
                self.command,
                time_limit_s=self.time_limit_s,
                variables=self._variables(payload, endpoint) | self.environment,
                stdin=payload.encode(),
                most_output=_MOST_PRINTED,
            )
            whole = len(ended.stdout.encode()) <= _MOST_PRINTED
            return self._printed(task, ended.code, ended.stdout, whole, ended.output)
        command = [sys.executable if self.command[0] == "python" else self.command[0], *self.command[1:]]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=self.folder,
                env=self._environment(payload, endpoint, container),
                start_new_session=True,
            )
        except OSError as error:
            raise WorkflowError(f"{self._named(task)} cannot be started: {error}; correct workflow.command") from error
        printed, whole, errors, code = b"", True, b"", None
        try:
            async with asyncio.timeout(self.time_limit_s):
                (printed, whole), (errors, _), _ = await asyncio.gather(
                    _read(process.stdout), _read(process.stderr), _tell(process.stdin, payload.encode())
                )
                code = await process.wait()
        except TimeoutError:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its subprocesses, too
            process._transport.close()  # type: ignore[attr-defined]  # unread output would keep it from ending
            await process.wait()
        return self._printed(task, code, printed.decode("utf-8", "replace"), whole, errors.decode("utf-8", "replace"))

    def _printed(self, task: Task, code: int | None, printed: str, whole: bool, errors: str) -> str:
        """Returns its answer. Raises WorkflowError if it failed, or was ended (no code)."""
        if code is None:
            text = f"{self._named(task)} took longer than {self.time_limit_s:g} s"
            raise WorkflowError(f"{text}; raise workflow.time_limit_s, or let it end sooner")
        if code != 0:
            tail = errors[-_TAIL:].strip()
            raise WorkflowError(f"{self._named(task)} ended with exit code {code}: {tail or 'it printed no error'}")
        if not whole:
            raise WorkflowError(f"{self._named(task)} printed more than {_MOST_PRINTED} bytes; let it print its answer")
        return printed.strip()

    def _environment(self, payload: str, endpoint: EndpointAccess, container: Container | None) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key != _TASK}
        if container is not None:
            inherited |= {"ROLLMILL_CONTAINER": container.id, "DOCKER_HOST": container.engine_url}
        return inherited | self._variables(payload, endpoint) | self.environment

    def _variables(self, payload: str, endpoint: EndpointAccess) -> dict[str, str]:
        variables = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "ANTHROPIC_BASE_URL": endpoint.address,
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "PYTHONUNBUFFERED": "1",
        }
        for name in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine
            variables[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        if len(payload.encode()) <= _LONGEST_VARIABLE:
            variables[_TASK] = payload
        return variables

    def _named(self, task: Task) -> str:
        return f"task {task.id}: workflow `program`: `{' '.join(self.command)}`"


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
