"""Worker: other ways to pass experiences between processes: pickled rows, a plain file, a Ray queue."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.worker import Channel, serve, versions
from rollmill.buffer.base import Group
from rollmill.buffer.row_codec import encode_experience_columns
from rollmill.types import Experience, Turn

GROUP, BATCH, TOKENS, PROMPT = 8, 256, 1000, 100
_QUESTION, _ANSWER = "How many apples are left? ", "So we subtract 3 from 12, "


def made(batches: int) -> list[list[Group]]:
    """Make batches of 256 experiences of 1,000 tokens (100 of the prompt), in groups of 8, with text and rewards."""
    draw = np.random.default_rng(0)
    names = [[f"train-{batch * BATCH // GROUP + n:06d}" for n in range(BATCH // GROUP)] for batch in range(batches)]
    return [[Group(name, [_experience(name, i, draw) for i in range(GROUP)]) for name in batch] for batch in names]


def _experience(group: str, index: int, draw: np.random.Generator) -> Experience:
    own = np.arange(TOKENS) >= PROMPT
    prompt, response = _QUESTION * 15, _ANSWER * 135
    return Experience(
        id=f"{group}/{index}",
        task_id=group,
        group=group,
        token_ids=draw.integers(0, 151_936, TOKENS).astype(np.int32),
        action_mask=own,
        logprobs=np.where(own, -draw.exponential(size=TOKENS), 0).astype(np.float32),
        versions=np.where(own, 7, -1).astype(np.int32),
        reward=float(index % 2),
        reward_parts={"math": float(index % 2), "format": 0.1},
        turns=[Turn("prompt", 0, PROMPT, prompt), Turn("assistant", PROMPT, TOKENS, response)],
        prompt=prompt,
        response=response,
        timings={"queue": 0.01, "generate": 3.25, "reward": 0.002},
    )


def row_bytes(batch: list[Group]) -> bytes:
    """Bytes of our rows of a batch, concatenated."""
    values = [value for group in batch for value in encode_experience_columns(group.experiences).values()]
    return b"".join(value.encode() if isinstance(value, str) else value for value in values)


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder on the disk of $TMPDIR."""
    path = Path(tempfile.mkdtemp(prefix="bench-buffer-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def rates(
    batches: list[list[Group]], write: Callable[[list[Group]], Any], read: Callable[[int], int]
) -> dict[str, float]:
    """Experiences per second written, then read; `read` takes the number of a batch and returns its size."""
    count = len(batches) * BATCH
    began = time.perf_counter()
    for batch in batches:
        write(batch)
    between = time.perf_counter()
    assert sum(read(number) for number in range(len(batches))) == count
    ended = time.perf_counter()
    return {"written": count / (between - began), "read": count / (ended - between)}


def pickled(batches: list[list[Group]]) -> dict[str, float]:
    """One pickle per row of a SQLite table, one transaction per batch, in WAL mode."""
    with folder() as path:
        database = sqlite3.connect(path / "b.sqlite", isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY AUTOINCREMENT, data BLOB)")

        def write(batch: list[Group]) -> None:
            rows = [(pickle.dumps(each, protocol=5),) for group in batch for each in group.experiences]
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT INTO rows (data) VALUES (?)", rows)
            database.execute("COMMIT")

        def read(number: int) -> int:
            page = database.execute("SELECT data FROM rows WHERE id > ? ORDER BY id LIMIT ?", (number * BATCH, BATCH))
            return len([pickle.loads(data) for (data,) in page])

        return rates(batches, write, read)


def plain_file(batches: list[list[Group]]) -> dict[str, float]:
    """The bytes of our rows appended to a file, with fsync per batch: without and with the time to encode them."""
    ready = [row_bytes(batch) for batch in batches]
    found: dict[str, float] = {}
    for name, make in (("written", None), ("encoded", row_bytes)):
        with folder() as path, (path / "rows").open("wb", buffering=0) as file:
            began = time.perf_counter()
            for batch, known in zip(batches, ready, strict=True):
                file.write(known if make is None else make(batch))
                os.fsync(file.fileno())
            found[name] = len(batches) * BATCH / (time.perf_counter() - began)
    return found | {"bytes": sum(map(len, ready)) / (len(batches) * BATCH)}


def ray_queue(batches: list[list[Group]]) -> dict[str, float]:
    """`ray.util.queue.Queue`, a batch of 256 items at a time; in memory."""
    from ray.util.queue import Queue

    queue = Queue()

    def write(batch: list[Group]) -> None:
        queue.put_nowait_batch([each for group in batch for each in group.experiences])

    found = rates(batches, write, lambda _: len(queue.get_nowait_batch(BATCH)))
    queue.shutdown()
    return found


KINDS = {"pickled": pickled, "file": plain_file, "ray": ray_queue}


def main() -> None:
    channel = Channel()
    kind, batches = sys.argv[1], made(int(sys.argv[2]))
    if kind == "ray":
        import ray

        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    serve(channel, lambda: KINDS[kind](batches), versions=versions("ray") if kind == "ray" else versions())


if __name__ == "__main__":
    main()
