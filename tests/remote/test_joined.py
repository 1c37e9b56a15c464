"""The trainer's status in the run directory, by which explorers find it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.remote import joined_explorers
from rollmill.remote.joined_explorers import JoinedExplorers
from rollmill.remote.run_state import TRAINER_STATUS, read_trainer_status


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.005)


def test_a_status_that_somebody_removes_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_explorers, "_STATUS_LOOK_S", 0.01)
    run_dir = tmp_path / "out"
    run_dir.mkdir()
    path = run_dir / TRAINER_STATUS

    async def serve() -> None:
        async with JoinedExplorers(run_dir, "x").serving():
            first = read_trainer_status(run_dir)
            assert first is not None
            assert (first.run_id, first.done) == ("x", False)
            for _ in range(2):
                path.unlink()
                await until(path.exists)
                assert read_trainer_status(run_dir) == first
                assert path.stat().st_mode & 0o77 == 0, "it holds the key"
            run_dir.rename(tmp_path / "moved")  # nothing is written where there is no run directory
            await asyncio.sleep(0.05)
            assert not run_dir.exists()
            (tmp_path / "moved").rename(run_dir)
        path.unlink()
        await asyncio.sleep(0.05)
        assert not path.exists(), "a trainer that has ended writes nothing"

    asyncio.run(serve())


def test_at_the_end_explorers_find_that_the_run_is_done(tmp_path: Path) -> None:
    async def serve() -> None:
        async with JoinedExplorers(tmp_path, "x").serving():
            pass

    asyncio.run(serve())
    found = read_trainer_status(tmp_path)
    assert found is not None
    assert (found.done, found.key) == (True, "")
