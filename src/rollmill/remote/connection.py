"""Connection between a trainer and a process that has joined its run: method calls over a TCP connection.

Both sides first prove by HMAC that they know the key of the trainer (`trainer.json`), without sending it; nothing is
unpickled before. Then each message is one frame: its length, and a pickled tuple.

    trainer -> worker    (number, method, arguments)    call; number None: the result is not wanted
    trainer -> worker    (number, None, ())             cancel that call
    worker -> trainer    (number, error, result)        reply; error is None if the call succeeded
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import pickle
import secrets
import traceback
from asyncio import StreamReader, StreamWriter
from typing import Any

from rollmill.errors import RollmillError
from rollmill.remote.worker_pool import WorkerLostError

_NONCE_BYTES = 32
_TRAINER, _WORKER = b"trainer", b"worker"
_LENGTH_BYTES = 8
LOST = (OSError, EOFError, pickle.UnpicklingError)
"""Errors of a connection that has ended, or was refused (IncompleteReadError is an EOFError)."""


async def accept_worker(reader: StreamReader, writer: StreamWriter, key: bytes) -> Any:
    """Authenticate a worker that connects; returns what it says about itself. Raises OSError for a wrong key."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    writer.write(ours)
    theirs, proof = await reader.readexactly(_NONCE_BYTES), await reader.readexactly(_NONCE_BYTES)
    if not hmac.compare_digest(proof, _prove(key, _WORKER, ours, theirs)):
        raise ConnectionRefusedError("a process with another key tried to join")
    writer.write(_prove(key, _TRAINER, ours, theirs))
    return await read_message(reader)


async def join_trainer(reader: StreamReader, writer: StreamWriter, key: bytes, about: Any) -> None:
    """Authenticate as a worker, and send `about`. Raises one of LOST if the other side has another key."""
    theirs, ours = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    writer.write(ours + _prove(key, _WORKER, theirs, ours))
    if not hmac.compare_digest(await reader.readexactly(_NONCE_BYTES), _prove(key, _TRAINER, theirs, ours)):
        raise ConnectionRefusedError("the address of the trainer is in use by another program")
    write_message(writer, about)


def _prove(key: bytes, side: bytes, trainers: bytes, workers: bytes) -> bytes:
    """Both nonces are signed, so that no proof can be used again; the side keeps one from being sent back."""
    return hmac.digest(key, side + trainers + workers, "sha256")


def write_message(writer: StreamWriter, message: Any) -> None:
    writer.write(_encode(message))


def _encode(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_message(reader: StreamReader) -> Any:
    """Receive a message. Raises one of LOST at the end of the connection."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return pickle.loads(await reader.readexactly(length))


class ConnectedWorker:
    """A worker that has joined; a WorkerHandle. If its connection ends, it is lost, and may join again."""

    restartable = False

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._writer, self._numbers = writer, itertools.count()
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.ensure_future(self._read(reader))

    async def call(self, method: str, *arguments: Any) -> Any:
        if self._reading.done():
            raise WorkerLostError("its connection has ended")
        number, result = next(self._numbers), asyncio.get_running_loop().create_future()
        self._results[number] = result
        try:
            write_message(self._writer, (number, method, arguments))
            return await result
        except asyncio.CancelledError:
            if not self._reading.done():
                write_message(self._writer, (number, None, ()))
            raise
        finally:
            del self._results[number]

    def notify(self, method: str, *arguments: Any) -> None:
        if not self._reading.done():
            write_message(self._writer, (None, method, arguments))

    def kill(self) -> None:
        """End the connection; the process drops its work as soon as it notices."""
        self._writer.transport.abort()

    async def _read(self, reader: StreamReader) -> None:
        try:
            while True:
                number, error, value = await read_message(reader)
                result = self._results.get(number)
                if result is None or result.done():
                    continue
                if error is None:
                    result.set_result(value)
                else:
                    result.set_exception(error)
        except LOST:
            why = "its connection has ended"
        except Exception as error:  # a class of another version, for example
            why = f"its reply cannot be read: {type(error).__name__}: {error}"
        self.kill()
        for result in self._results.values():
            if not result.done():
                result.set_exception(WorkerLostError(why))


async def serve_calls(reader: StreamReader, writer: StreamWriter, worker: Any) -> BaseException | None:
    """Serve the trainer's calls of a worker's methods until the connection ends; then cancel those that still run.

    Returns the error of `begin`, if it failed: this process cannot do the work of the run.
    """
    running: dict[int, asyncio.Task[None]] = {}
    unnumbered = itertools.count(-1, -1)
    failures: list[BaseException] = []

    async def run(number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            reply = _encode((number, None, await getattr(worker, method)(*arguments)))
        except (Exception, SystemExit) as raised:  # also of a result that cannot be pickled
            reply = _encode((number, portable_error(raised, "an explorer's process"), None))
            if method == "begin":
                failures.append(raised)
        if number is not None:
            writer.write(reply)
        if failures:
            writer.close()  # after the reply

    try:
        while True:
            number, method, arguments = await read_message(reader)
            if method is None:
                if number in running:
                    running[number].cancel()
                continue
            key = next(unnumbered) if number is None else number
            running[key] = asyncio.ensure_future(run(number, method, arguments))
            running[key].add_done_callback(lambda _, key=key: running.pop(key))  # type: ignore[misc]
    except LOST:
        return failures[0] if failures else None
    finally:
        tasks = list(running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def portable_error(error: BaseException, where: str) -> BaseException:
    """Return an error that another process can raise: the error itself, or its traceback if it cannot be pickled.

    Args:
        where: the process that raised it, for errors that are not the user's.
    """
    if not isinstance(error, RollmillError):
        error.add_note(f"In {where}:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
