"""The stores that a run opens: its own, people's feedback on it, and what other runs hold."""

from __future__ import annotations

from pathlib import Path

from rollmill.buffer import Shelf, Store
from rollmill.buffer.build import FILE, database_url, open_run, open_store, run_store
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.parquet import read_parquet
from rollmill.buffer.shelves import Shelves
from rollmill.config.run import StageConfig


class Buffers:
    """Opens stores and closes all of them at the end.

    Args:
        run_id: what a database that several runs share knows the run by.
        read_only: the run is looked at, not continued: nothing is kept.
    """

    def __init__(self, run_dir: Path, run_id: str, *, read_only: bool = False) -> None:
        self._run_dir, self._run_id, self._read_only = run_dir, run_id, read_only
        self._open: list[Store] = []

    def of_stage(self, config: StageConfig) -> Store:
        """Where a stage keeps its experiences."""
        if self._read_only:
            return MemoryStore()
        made = any(operator.makes_experiences for operator in config.pipeline)
        persistent = config.max_staleness > 0 or config.buffer.replay is not None or made
        return self._kept(open_store(config.buffer, run_dir=self._run_dir, run_id=self._run_id, persistent=persistent))

    def of_run(self, store: Store) -> list[Shelves]:
        """What has been put on the run's shelves: in the stage's own store, and by feedback beside it."""
        own = Shelves("this run", lambda: store)
        if not isinstance(store, MemoryStore):
            return [own]
        return [own, Shelves("the run's feedback", self._feedback)]

    def of_others(self, source: Path) -> Shelves:
        """What another run, or a Parquet file, holds."""
        store = self._kept(_read(source) if source.suffix == ".parquet" else open_run(source))
        return Shelves(str(source), lambda: store)

    def close(self) -> None:
        """Close everything that was opened."""
        for store in self._open:
            store.close()
        self._open.clear()

    def _kept(self, store: Store) -> Store:
        self._open.append(store)
        return store

    def _feedback(self) -> Store | None:
        """None before any was given. Opened for writing: the file may be there before its tables are."""
        if database_url(self._run_dir) is None and not (self._run_dir / FILE).is_file():
            return None
        return self._kept(run_store(self._run_dir))


def _read(file: Path) -> MemoryStore:
    """A Parquet file's demonstrations, pairs and ratings."""
    store = MemoryStore()
    store.put([group for group in read_parquet(file) if group.shelf in (Shelf.EXPERT, Shelf.PREFERENCE, Shelf.RATED)])
    return store
