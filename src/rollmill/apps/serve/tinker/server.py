"""Serves base models to clients of the tinker SDK. Importing it needs neither web libraries nor the package tinker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rollmill.apps.serve.endpoint.server import WebServer
from rollmill.apps.serve.serving import ServerAddress, find_checkpoint, until_signal
from rollmill.apps.serve.web import server_url
from rollmill.apps.serve.web.keys import KeyRateLimiter
from rollmill.apps.serve.web.middleware import ASGIApp
from rollmill.errors import ConfigError
from rollmill.orchestrator.setup import choose_device

if TYPE_CHECKING:
    from rollmill.apps.serve.tinker.adapters import Precision

MISSING = "`rollmill serve --tinker` needs the extra `tinker`: pip install 'rollmill[tinker]'"


def serve_tinker(
    bases: Mapping[str, Path],
    place: ServerAddress,
    checkpoints: Path,
    device: str = "auto",
    precision: Precision = "auto",
) -> None:
    """Serve base models until SIGINT, SIGTERM or SIGHUP.

    Args:
        bases: folders, run directories or run files by the names that clients give.
        checkpoints: folder for what clients save.
        precision: of training and sampling.

    Raises:
        ConfigError: a library is missing, or there is no model.
        ModelError: a model cannot be used.
    """

    async def serve() -> None:
        await until_signal(_serving(bases, place, checkpoints, device, precision))

    asyncio.run(serve())


class TinkerServer:
    """Serves from a thread of this process, from `start` to `stop`; a context manager does both.

    Args: see `serve_tinker`.
    """

    def __init__(
        self,
        bases: Mapping[str, Path],
        place: ServerAddress,
        checkpoints: Path,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        self.url = server_url(place.rules.host, place.listener)
        self._arguments = bases, place, checkpoints, device, precision
        self._ended, self._listens = asyncio.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollmill-tinker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._listens.wait(0.05) and self._thread.is_alive():
            pass
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # raised by `start`
            self._failure = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with _serving(*self._arguments):
            self._listens.set()
            await self._ended.wait()


@asynccontextmanager
async def _serving(
    bases: Mapping[str, Path], place: ServerAddress, checkpoints: Path, device: str, precision: Precision
) -> AsyncIterator[None]:
    try:
        from rollmill.apps.serve.tinker.adapters import SharedBase
        from rollmill.apps.serve.tinker.checkpoints import CheckpointStore
        from rollmill.apps.serve.tinker.service import TinkerService
    except ImportError as error:
        raise ConfigError(MISSING) from error
    where, loaded = choose_device(device), dict[Path, SharedBase]()
    named: dict[str, SharedBase] = {}
    for name, source in bases.items():
        folder = find_checkpoint(source, None).resolve()
        if folder not in loaded:
            loaded[folder] = SharedBase(folder, where, precision)
        named[name] = loaded[folder]
    keys = () if place.rules.keys is None else place.rules.keys.keys
    rates = KeyRateLimiter(keys, place.limits.requests_per_minute, place.limits.tokens_per_minute)
    service = TinkerService(named, CheckpointStore(checkpoints), place.limits, rates)

    def make() -> ASGIApp:
        from rollmill.apps.serve.tinker.app import make_app

        return make_app(service, place.rules)

    server = WebServer(make, place.rules.connections, place.listener)
    await server.start()
    place.ready()
    try:
        yield
    finally:
        await service.close()
        await server.stop()
