"""Shared fixtures: one thread, the folder with real data, the command line, and a server for tests marked `service`."""

from __future__ import annotations

import ast
import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; commands would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "ROLLMILL_CACHE" not in os.environ:  # one for all workers of pytest
    os.environ["ROLLMILL_CACHE"] = tempfile.mkdtemp(prefix="rollmill-tests-")
    atexit.register(shutil.rmtree, os.environ["ROLLMILL_CACHE"], ignore_errors=True)
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # Ray kills for what other programs take

from hypothesis import HealthCheck, settings
from support.forks import Forks, fork_ranks_and_workers, forks, share_server
from support.postgres import Postgres, missing

share_server()
# The same examples in every run, so that chance fails none. HYPOTHESIS_PROFILE=search tries many others.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=50
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "any machine"))


_parse = ast.parse


def _parse_again(*args: Any, **options: Any) -> Any:
    """Parse as often as it takes: CPython 3.11 fails now and then where another thread parses (rollmill.python_source).

    pytest parses every module whose assertions it rewrites, which may be imported beside a server's threads.
    """
    for _ in range(99):
        try:
            return _parse(*args, **options)
        except SystemError:
            continue
    return _parse(*args, **options)


ast.parse = _parse_again


def pytest_collection() -> None:
    """Turn the garbage collector off: it would look at all imported modules again and again, for ten seconds in all."""
    import torch  # here, since the process that shares out tests to others collects none and needs no torch

    torch.set_num_threads(1)
    gc.disable()


def pytest_collection_finish() -> None:
    """Turn it on again, for what tests make: rarely, and without a look at imported modules and tests, which stay."""
    fork_ranks_and_workers()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with real data: $ROLLMILL_DATA, or shared/data beside the repository. Skips where there is none."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("ROLLMILL_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set ROLLMILL_DATA")
    return folder


@pytest.fixture(scope="session")
def server() -> Iterator[Forks]:
    """Runs the command line in processes of its own."""
    with forks() as running:
        yield running


@pytest.fixture(scope="session")
def pg() -> Iterator[Postgres]:
    """A PostgreSQL server of its own."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    made = Postgres()
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.service)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, or of a server that others use, too."""
    if request.param == "postgres":
        return str(request.getfixturevalue("pg").url)
    return f"sqlite:///{tmp_path / 'b.sqlite'}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless browser. Skips where there is none."""
    from support.browser import chromium  # playwright is optional

    with chromium() as opened:
        yield opened
