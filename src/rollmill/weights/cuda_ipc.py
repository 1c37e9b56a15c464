"""Hands buckets of weights to readers on the same host by CUDA IPC, so that they stay on GPUs.

The sender listens at a socket beside the shared weights (PATH.ipc). An engine that runs is told of a version just
before it is sent; each of its processes with a GPU connects, copies one bucket after the other, and confirms each. The
sender packs into two pieces of memory in turn, and fills one again when all have confirmed what was in it. Whoever
cannot map the memory says why, and reads the version from host memory, as everybody does who comes later.

    reader: the GPUs that it sees, and how many readers the engine has
    sender: version, layout, bytes of a bucket, its GPU; or why not
    sender: piece of memory, and how to map it (None: as before) | reader: "", or why it cannot
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rollmill.weights.layout import BlockLayout

_JOIN_S = 30.0
"""Limit for the readers of an engine to come, which first ends a step of its model."""
_BUCKET_S = 60.0
_DEVICE = 6  # of the arguments of `rebuild_cuda_tensor`: the number of the GPU, which may differ between processes
_LOST = (EOFError, OSError, TimeoutError)
_log = logging.getLogger(__name__)


class IPCUnavailableError(Exception):
    """A version cannot be read by CUDA IPC; the text says why."""


class IPCSender:
    """Offers versions to the readers of an engine, from the trainer's process.

    Args:
        path: of the shared weights.
        device: the GPU that the weights are on.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._gpu = ipc_socket(path), _uuid(device)
        self._socket: socket.socket | None = None
        self._readers: list[Connection] = []
        self._unconfirmed: dict[int, list[Connection]] = {}  # piece of memory -> readers that may still copy it
        self._known: set[int] = set()  # pieces of memory that the readers have mapped

    def open(self) -> None:
        """Listens for readers, until `end`; an engine can be told now."""
        self.close()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._socket.listen()

    def begin(self, version: int, layout: BlockLayout, bucket_bytes: int) -> None:
        """Waits for the readers of the engine that was told to load a version."""
        assert self._socket is not None
        self._readers, self._unconfirmed, self._known = [], {}, set()
        ends, missing = time.monotonic() + _JOIN_S, 1
        asked = 0
        while asked < missing and (left := ends - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection = Connection(self._socket.accept()[0].detach())
                gpus, missing = _receive(connection, _BUCKET_S)
                asked += 1
                if self._gpu in gpus:
                    connection.send((version, layout.to_json(), bucket_bytes, self._gpu))
                    self._readers.append(connection)
                else:
                    connection.send("it does not see the trainer's GPU")
                    connection.close()
            except _LOST:
                continue  # nobody came, or one that has given up before

    def wait(self, piece: int) -> None:
        """Waits until no reader copies from a piece of memory any more."""
        for reader in self._unconfirmed.pop(piece, []):
            try:
                if _receive(reader, _BUCKET_S):
                    self._drop(reader)
            except _LOST as error:
                _log.warning("an engine stopped reading weights by CUDA IPC: %s", error or type(error).__name__)
                self._drop(reader)

    def hand(self, piece: int, packed: Tensor) -> None:
        """Lets all readers copy a bucket, once it is packed."""
        if not self._readers:
            return
        torch.cuda.current_stream(packed.device).synchronize()
        for reader in list(self._readers):
            try:
                reader.send((piece, None if piece in self._known else reduce_tensor(packed)[1]))
            except OSError:
                self._drop(reader)
        self._known.add(piece)
        self._unconfirmed[piece] = list(self._readers)

    def end(self) -> None:
        """Waits until all is copied, and lets the readers go."""
        for piece in list(self._unconfirmed):
            self.wait(piece)
        for reader in list(self._readers):
            self._drop(reader)
        self.close()

    def close(self) -> None:
        """Removes the socket; who comes too late is turned away."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._path.unlink(missing_ok=True)

    def _drop(self, reader: Connection) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        for waited in self._unconfirmed.values():
            if reader in waited:
                waited.remove(reader)
        reader.close()


class IPCReader:
    """One process of an engine that loads a version while it is sent.

    Args:
        path: of the shared weights.
        device: the GPU that the engine computes on.
        readers: number of processes that load it.

    Raises:
        IPCUnavailableError: the trainer has no weights on a GPU that this process sees, or sends none now.
    """

    def __init__(self, path: Path, device: torch.device, readers: int) -> None:
        self._device = device
        here = {_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(ipc_socket(path)))
            self._connection = Connection(connection.detach())
            self._connection.send((list(here), readers))
            answer = _receive(self._connection, _JOIN_S)
        except _LOST as error:
            raise IPCUnavailableError(f"the trainer does not offer it ({error or type(error).__name__})") from error
        if isinstance(answer, str):
            raise IPCUnavailableError(answer)
        self.version: int = answer[0]
        self._layout, self._bucket_bytes = BlockLayout.from_json(answer[1]), int(answer[2])
        self._theirs = here[answer[3]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the version, in memory of their own.

        Raises:
            IPCUnavailableError: this process cannot map the trainer's memory, or the trainer stopped.
        """
        mapped: dict[int, Tensor] = {}
        try:
            for bucket in self._layout.buckets(self._bucket_bytes):
                piece, handle = _receive(self._connection, _BUCKET_S)
                if piece not in mapped:
                    arguments = list(handle)
                    arguments[_DEVICE] = self._theirs
                    try:
                        mapped[piece] = rebuild_cuda_tensor(*arguments)
                    except Exception as error:  # torch's own, of many kinds
                        self._connection.send(str(error) or type(error).__name__)
                        raise IPCUnavailableError(f"the trainer's memory cannot be mapped: {error}") from error
                packed = mapped[piece][: bucket.layout.size].to(self._device, copy=True)
                torch.cuda.current_stream(self._device).synchronize()
                self._connection.send("")
                yield from bucket.layout.tensors(packed).items()
        except _LOST as error:
            raise IPCUnavailableError(f"the trainer stopped sending ({error or type(error).__name__})") from error
        finally:
            mapped.clear()
            self._connection.close()


def ipc_socket(path: Path) -> Path:
    """Returns where the sender of the weights at a path listens."""
    return path.with_name(path.name + ".ipc")


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _receive(connection: Connection, seconds: float) -> Any:
    """Returns the next message. Raises TimeoutError, EOFError or OSError."""
    if not connection.poll(seconds):
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return connection.recv()
