"""Hands buckets of weights to readers on the same host by CUDA IPC, so that they stay on GPUs.

The sender listens at a socket (PATH.ipc). Engines that run, here or in explorers, are told of a version just before it
is sent; each of their processes with a GPU connects, copies one bucket after the other, and confirms each. The sender
packs into two pieces of memory in turn, and fills one again when all have confirmed what was in it. Whoever cannot map
the memory says why, and takes the version by way of the host, as everybody does who comes later. Nobody is awaited for
longer than a deadline: who misses it is dropped, and finds its connection closed.

    reader: the name of its engine, the GPUs that it sees, and how many readers the engine has
    sender: version, layout, bytes of a bucket, its GPU; or why not
    sender: piece of memory, and how to map it (None: as before) | reader: "", or why it cannot
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rollmill.weights.layout import BlockLayout

JOIN_S = 30.0
"""Limit for the readers of an engine to come, which first ends a step of its model."""
_BUCKET_S = 60.0
_HELLO_S = 1.0
_BACKLOG = 128
_DEVICE = 6  # of the arguments of `rebuild_cuda_tensor`: the number of the GPU, which may differ between processes
_LOST = (EOFError, OSError, TimeoutError)
_log = logging.getLogger(__name__)


class IPCUnavailableError(Exception):
    """A version cannot be read by CUDA IPC; the text says why."""


class IPCSender:
    """Offers versions to the readers of engines, from the trainer's process.

    Args:
        path: what readers know it by.
        device: the GPU that the weights are on.
        join_s: limit for the readers that are told to come.
        bucket_s: limit for a reader to copy a bucket.
    """

    def __init__(
        self, path: Path, device: torch.device, *, join_s: float = JOIN_S, bucket_s: float = _BUCKET_S
    ) -> None:
        self.path, self._gpu = path, _uuid(device)
        self._join_s, self._bucket_s = join_s, bucket_s
        self._socket: socket.socket | None = None
        self._version, self._awaited = -1, frozenset[str]()
        self.missed = set[str]()  #: engines that were told of the last version and did not come
        self._readers: dict[Connection, str] = {}  # with the name of their engine
        self._unconfirmed: dict[int, list[Connection]] = {}  # piece of memory -> readers that may still copy it
        self._handles: dict[int, tuple[Any, ...]] = {}  # piece of memory -> how readers have mapped it
        _sign(path).touch(0o600)

    def offer(self, version: int, weights: Mapping[str, Tensor], engines: Collection[str]) -> bool:
        """Listens for the readers of engines, which can be told of a version now; it has to be sent afterwards.

        Returns False if it cannot be taken by CUDA IPC: the weights are in host memory now, or there are no engines.
        """
        self._turn_away()
        if not engines or next(iter(weights.values())).device.type != "cuda":
            return False
        self._version, self._awaited = version, frozenset(engines)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(ipc_socket(self.path)))
        os.chmod(ipc_socket(self.path), 0o600)
        self._socket.listen(_BACKLOG)
        return True

    def begin(self, layout: BlockLayout, bucket_bytes: int) -> None:
        """Waits for the readers of the engines that were told to load the offered version."""
        assert self._socket is not None
        self._readers, self._unconfirmed, self._handles = {}, {}, {}
        ends, missing, came = time.monotonic() + self._join_s, set(self._awaited), Counter[str]()
        while True:
            left = max(0.0, ends - time.monotonic()) if missing else 0.0
            self._socket.settimeout(left)
            try:
                connection = Connection(self._socket.accept()[0].detach())
            except OSError:
                break  # nobody else comes
            try:
                engine, gpus, readers = _receive(connection, max(left, _HELLO_S))
                came[engine] += 1
                if came[engine] >= readers:
                    missing.discard(engine)
                if self._gpu in gpus:
                    connection.send((self._version, layout.to_json(), bucket_bytes, self._gpu))
                    self._readers[connection] = engine
                else:
                    connection.send("it does not see the trainer's GPU")
                    connection.close()
            except _LOST:
                connection.close()  # one that has given up before
        self.missed = missing
        if missing:
            who = ", ".join(sorted(missing))
            _log.warning("%s did not come for weights by CUDA IPC within %g s, and is not awaited", who, self._join_s)
        self._turn_away()  # who comes now takes the version another way

    def wait(self, piece: int) -> None:
        """Waits until no reader copies from a piece of memory any more."""
        for reader in self._unconfirmed.pop(piece, []):
            try:
                if _receive(reader, self._bucket_s):
                    self._drop(reader)  # it has said why it cannot
            except _LOST as error:
                why = str(error) or type(error).__name__
                _log.warning("%s stopped reading weights by CUDA IPC: %s", self._readers[reader], why)
                self._drop(reader)

    def hand(self, piece: int, packed: Tensor) -> None:
        """Lets all readers copy a bucket, once it is packed."""
        if not self._readers:
            return
        torch.cuda.current_stream(packed.device).synchronize()
        if not (known := piece in self._handles):
            self._handles[piece] = reduce_tensor(packed)[1]
        for reader in list(self._readers):
            try:
                reader.send((piece, None if known else self._handles[piece]))
            except OSError:
                self._drop(reader)
        self._unconfirmed[piece] = list(self._readers)

    def end(self) -> None:
        """Waits until all is copied, and lets the readers go."""
        for piece in list(self._unconfirmed):
            self.wait(piece)
        if not self._readers:  # nobody is left to give the memory back: torch would keep it for the dead
            for *_, device, _, _, _, _, counter, offset, _, _ in self._handles.values():
                torch.UntypedStorage._release_ipc_counter(counter, offset, device=device)
        for reader in list(self._readers):
            self._drop(reader)

    def close(self) -> None:
        """Removes what readers find the sender by."""
        self._turn_away()
        _sign(self.path).unlink(missing_ok=True)

    def _turn_away(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        ipc_socket(self.path).unlink(missing_ok=True)

    def _drop(self, reader: Connection) -> None:
        self._readers.pop(reader, None)
        for waited in self._unconfirmed.values():
            if reader in waited:
                waited.remove(reader)
        reader.close()


class IPCReader:
    """One process of an engine that loads a version while it is sent.

    Args:
        path: of the sender.
        device: the GPU that the engine computes on.
        engine: its name for the sender.
        readers: number of processes that load it.
        at_least: the version that it was told of.

    Raises:
        IPCUnavailableError: the trainer has no weights on a GPU that this process sees, or sends none now.
    """

    def __init__(self, path: Path, device: torch.device, engine: str, readers: int = 1, *, at_least: int = 0) -> None:
        self._device = device
        here = {_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(ipc_socket(path)))
            self._connection = Connection(connection.detach())
            self._connection.send((engine, list(here), readers))
            answer = _receive(self._connection, JOIN_S)
        except _LOST as error:
            raise IPCUnavailableError(f"the trainer does not offer it ({error or type(error).__name__})") from error
        if isinstance(answer, str):
            raise IPCUnavailableError(answer)
        self.version: int = answer[0]
        if self.version < at_least:
            self._connection.close()
            raise IPCUnavailableError(f"version {self.version} is sent")
        self._layout, self._bucket_bytes = BlockLayout.from_json(answer[1]), int(answer[2])
        self._theirs = here[answer[3]]

    def wait(self) -> None:
        """Waits for the first bucket, before which the sender waits for other readers."""
        self._connection.poll(JOIN_S)

    @torch.no_grad()
    def receive(self, into: Mapping[str, Tensor]) -> int:
        """Copies the version into tensors of its names; returns its number. Raises like `tensors`, and WeightSyncError
        if they are others."""
        self._layout.require(into, "the engine's model")
        for name, tensor in self.tensors():
            into[name].copy_(tensor)
        return self.version

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


def sender_is_here(path: Path | None) -> bool:
    """True if there is a sender on this host that offers weights by CUDA IPC."""
    return path is not None and _sign(path).exists()


def _sign(path: Path) -> Path:
    return path.with_name(path.name + ".gpu")


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
