"""Client of vLLM's process: starts it, exchanges messages with it and detects its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import rollmill
from rollmill.config.checks.pictures import VLLM_SEES_WITHOUT_TORCHVISION
from rollmill.engines.vllm.process_tree import find_needed, wait_for_loss
from rollmill.engines.vllm.worker import MAX_LINE_BYTES
from rollmill.errors import ConfigError, DeadlineError, EngineError, EngineLostError
from rollmill.files import try_lock
from rollmill.waiting import wait_with_grace

_PROGRAM = "rollmill.engines.vllm.worker"
_LOG, _LOCK, _FOLDER = "vllm.log", "lock", "rollmill-vllm-"
_SHOWN = 3000
_LEAVING_S, _LOOK_S = 10.0, 0.05
_LAST_WORDS_S = 2.0
"""Wait for the exit code of a process that has closed its socket."""
_TOGETHER_S = 2.0
"""Wait for the end of a process whose subprocesses are gone: if it was killed, they end a moment before it."""
_PROBE = """
import importlib.util, json, sys
found = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "xxhash", "torchvision")}
print(json.dumps(found | {"version": sys.version_info[:2]}))
"""


@dataclass(frozen=True, slots=True)
class VLLMLaunchConfig:
    """Launch settings of a vLLM process.

    Args:
        python: a Python that has vLLM, which `probe_python` has checked.
        folder: the process's own folder, for the log, vLLM's sockets and the model's configuration.
        settings: the first message to `worker`.
        threads: CPU threads to compute with.
        deadline_s: longest wait for an answer.
        gpus: GPUs that the process sees, as CUDA_VISIBLE_DEVICES names them; empty: those that this process sees.
    """

    python: Path
    folder: Path
    settings: dict[str, Any]
    threads: int
    deadline_s: float
    lock: IO[str] | None = None  #: held as long as the folder is in use
    gpus: Sequence[str] = ()

    @property
    def log(self) -> Path:
        return self.folder / _LOG


def make_engine_folder(parent: Path) -> tuple[Path, IO[str] | None]:
    """Create a folder for an engine, and its lock; remove those whose processes were killed between two uses."""
    for left in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            if (left / _LOCK).is_file() and (lock := try_lock(left / _LOCK)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                lock.close()
    made = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=parent))
    lock = try_lock(made / _LOCK)
    return made.rename(parent / made.name.removeprefix(".")), lock  # seen by others only once it is locked


def probe_python(python: Path) -> dict[str, bool]:
    """Find out which of vllm, xxhash and torchvision a Python can import. Raises ConfigError if it cannot be used."""
    advice = "give a Python that has vLLM, such as .venv-vllm/bin/python (`make vllm-setup` makes it)"
    try:
        command = [str(python), "-c", _PROBE]
        shown = subprocess.run(command, capture_output=True, check=True, timeout=60, env=_plain_environment()).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.python: {python} does not run ({error}); {advice}") from error
    found: dict[str, Any] = json.loads(shown)
    if not found["vllm"]:
        raise ConfigError(f"engine.python: {python} cannot import vllm; {advice}")
    if tuple(found["version"]) < (3, 11):
        raise ConfigError(f"engine.python: {python} is older than Python 3.11; {advice}")
    return found


def require_torchvision(model_type: str, python: Path, found: dict[str, bool]) -> None:
    """Raise ConfigError if vLLM's environment lacks what its implementation of a vision-language model imports.

    Args:
        found: of `probe_python`.
    """
    if model_type not in VLLM_SEES_WITHOUT_TORCHVISION and not found["torchvision"]:
        raise ConfigError(
            f"engine.python: {python} has no torchvision, which vLLM needs for {model_type}: install the one that "
            f"belongs to its torch there, or use engine `native`"
        )


class VLLMProcess:
    """One vLLM process.

    Args:
        told: called with every message about a request.
        ended: called once, if the process ends unexpectedly.
    """

    def __init__(
        self,
        launch: VLLMLaunchConfig,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        told: Callable[[dict[str, Any]], None],
        ended: Callable[[], None],
    ) -> None:
        self._launch, self._process = launch, process
        self._reader, self._writer = streams
        self._told, self._ended = told, ended
        self._numbers = itertools.count(-1, -1)  # requests have positive ones
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._closing, self._why_lost = False, ""
        self._log_start = 0  # the log is continued by each process
        self._listening = asyncio.ensure_future(self._listen())
        self._watching = asyncio.ensure_future(self._watch())
        self._guarding: asyncio.Task[None] | None = None  # its subprocesses, once it has started

    @classmethod
    async def start(
        cls, launch: VLLMLaunchConfig, told: Callable[[dict[str, Any]], None], ended: Callable[[], None]
    ) -> tuple[VLLMProcess, int]:
        """Start a process; returns it and the version of its weights.

        Raises:
            EngineError: it ended; the message shows the end of its log.
            DeadlineError: it takes too long.
        """
        ours, theirs = socket.socketpair()
        with theirs, launch.log.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                str(launch.python),
                *("-P", "-m", _PROGRAM, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=_environment(launch),
                start_new_session=True,
            )
        made = cls(launch, process, await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES), told, ended)
        made._log_start = log_start
        try:
            first = made._await(0)
            made._write(launch.settings)
            version = int(await made._answer(0, first, "start"))
            needed = await asyncio.to_thread(find_needed, made.pid)  # before a caller can wait for them
            made._guarding = asyncio.ensure_future(made._guard(needed))
            return made, version
        except BaseException:
            made.kill()
            await made.close()
            raise

    @property
    def ended(self) -> bool:
        """True if its last message has been received."""
        return self._listening.done()

    @property
    def pid(self) -> int:
        """Its process id; vLLM's own subprocesses are in its process group."""
        return self._process.pid

    def send(self, kind: str, number: int, **message: Any) -> None:
        """Send a message; replies, if any, carry the same number."""
        self._write({"kind": kind, "id": number, **message})

    def request(self, kind: str, **message: Any) -> Coroutine[Any, Any, Any]:
        """Send a message at once, ahead of later ones; awaiting the result gives the reply.

        Raises:
            EngineError: it failed, or the process has ended.
            DeadlineError: no answer came.
        """
        number = next(self._numbers)
        future = self._await(number)
        self.send(kind, number, **message)
        return self._answer(number, future, kind)

    async def close(self, *, keep_folder: bool = False) -> None:
        """Stop it, gracefully at first; may be called twice. It removes its folder, unless another one will use it."""
        self._closing = True
        if keep_folder:
            self.send("keep folder", 0)
        if self._guarding is not None:
            self._guarding.cancel()
        self._writer.close()
        await asyncio.gather(self._watching, self._listening, return_exceptions=True)

    def kill(self, why: str = "") -> None:
        """Kill it; `why` is for `gone`."""
        self._why_lost = self._why_lost or why
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended. Not by asyncio's own method, which polls the process and so takes the
        exit code from its waiter."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def gone(self) -> EngineLostError:
        """Build the error for its end, with the exit code and the end of the log."""
        log = self._launch.log
        written = log.read_bytes()[self._log_start :] if log.is_file() else b""
        shown = written[-_SHOWN:].decode("utf-8", "replace").strip()
        code = self._process.returncode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        what = f"was ended, because {self._why_lost}" if self._why_lost else f"has ended ({how})"
        return EngineLostError(f"vLLM's process {what}. The end of its log:\n{shown or '(it is empty)'}")

    def _await(self, number: int) -> asyncio.Future[Any]:
        self._awaited[number] = future = asyncio.get_running_loop().create_future()
        if self.ended:
            future.set_exception(self.gone())
        return future

    async def _answer(self, number: int, future: asyncio.Future[Any], what: str) -> Any:
        limit = self._launch.deadline_s
        try:
            return await wait_with_grace(future, limit)
        except TimeoutError:
            advice = f"Its log is {self._launch.log}. Raise engine.deadline_s, or see what holds it up."
            raise DeadlineError("the engine", f"vLLM's process to {what}", limit, advice) from None
        finally:
            self._awaited.pop(number, None)

    def _write(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        """Dispatch messages until the process has ended."""
        try:
            with contextlib.suppress(ConnectionError):
                while line := await self._reader.readline():
                    self._take(json.loads(line))
                    await asyncio.sleep(0)  # many lines may have arrived at once; let other tasks run
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING_S if self._closing else _LAST_WORDS_S):
                    await self._process.wait()
            self.kill()
            await self._process.wait()
            for future in self._awaited.values():
                if not future.done():
                    future.set_exception(self.gone())
            if not self._closing:
                self._ended()

    def _take(self, message: dict[str, Any]) -> None:
        future = self._awaited.get(message["id"])
        if future is None:
            self._told(message)
        elif not future.done() and "error" in message:
            future.set_exception(EngineError(f"vLLM: {message['error']}"))
        elif not future.done():
            future.set_result(message["value"])

    async def _guard(self, needed: dict[int, str]) -> None:
        """End it if it loses a subprocess: it would not answer any more."""
        why = await wait_for_loss(self.pid, needed)
        self._signal(signal.SIGSTOP)  # so that it does not answer with errors of its own meanwhile
        try:
            async with asyncio.timeout(_TOGETHER_S):
                await self._process.wait()
        except TimeoutError:
            self.kill(why)

    async def _watch(self) -> None:
        """Wait for its end, then stop its subprocesses. They hold the socket open, too, and get time to free shared
        memory."""
        await self._process.wait()
        if self._guarding is not None:
            self._guarding.cancel()
        self._writer.transport.abort()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)  # one that is stopped would not notice
            for _ in range(int(_LEAVING_S / _LOOK_S)):
                await asyncio.sleep(_LOOK_S)
                os.killpg(self.pid, 0)
            os.killpg(self.pid, signal.SIGKILL)


def _plain_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _environment(launch: VLLMLaunchConfig) -> dict[str, str]:
    """Environment variables of the process. It can import rollmill, but no other package of this Python."""
    packages = launch.folder / "packages"
    packages.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (packages / "rollmill").symlink_to(Path(rollmill.__file__).parent)
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second one has another sampler than `TruncationSampler` extends
    }
    own = {
        "PYTHONPATH": str(packages),
        "OMP_NUM_THREADS": str(launch.threads),
        "VLLM_RPC_BASE_PATH": str(launch.folder),
        **({"CUDA_VISIBLE_DEVICES": ",".join(launch.gpus)} if launch.gpus else {}),
    }
    return defaults | _plain_environment() | own
