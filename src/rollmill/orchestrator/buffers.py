"""Opens the experience stores of a run: its own, its feedback, and those of other runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from rollmill.buffer import (
    DATABASE_FILE,
    ExperienceKind,
    ExperienceStore,
    create_run_store,
    database_url,
    open_run_store,
    open_store,
)
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.offline_data import StoreReader
from rollmill.buffer.parquet import read_parquet
from rollmill.config.run import StageConfig


class Buffers:
    """Opens stores and closes all of them at the end.

    Args:
        run_id: identifies the run in a database that several runs share.
        read_only: the run is only read, not continued: nothing is opened or stored.
        shared: other processes may put groups, so `auto` means a database.
    """

    def __init__(self, run_dir: Path, run_id: str, *, read_only: bool = False, shared: bool = False) -> None:
        self.run_dir, self._run_id, self._read_only, self.shared = run_dir, run_id, read_only, shared
        self._open: dict[str, ExperienceStore] = {}  # by name

    def open_all(self, stages: Sequence[StageConfig]) -> None:
        """Open all stores of the stages, so that missing ones show before the first stage runs."""
        for stage in stages:
            self.of_stage(stage)
            if stage.algorithm.uses_examples:
                for source in stage.offline_data.others:
                    self.of_others(source)

    def of_stage(self, config: StageConfig) -> ExperienceStore:
        """Open the store of a stage's experiences."""
        options, persistent = config.buffer, config.persistent or self.shared
        if self._read_only or not options.in_database(persistent):
            return MemoryStore(keep=0 if options.replay is None else options.replay.capacity)

        def opened() -> ExperienceStore:
            return open_store(options, run_dir=self.run_dir, run_id=self._run_id, persistent=persistent)

        return self._kept(f"the run's {options.url}", opened)

    def of_run(self, store: ExperienceStore) -> list[StoreReader]:
        """Readers of the run's experiences: the stage's own store, and the feedback stored beside it."""
        own = StoreReader("this run", lambda: store, own=True)
        if not isinstance(store, MemoryStore):
            return [own]
        return [own, StoreReader("the run's feedback", self._feedback)]

    def of_others(self, source: Path) -> StoreReader:
        """Reader of another run's store or of a Parquet file."""
        if self._read_only:
            return StoreReader(str(source), MemoryStore)
        store = self._kept(
            str(source), lambda: _read(source) if source.suffix == ".parquet" else open_run_store(source)
        )
        return StoreReader(str(source), lambda: store)

    def close(self) -> None:
        """Close all stores; the writer last, since only it cleans up beside a SQLite file."""
        for store in reversed(self._open.values()):
            store.close()
        self._open.clear()

    def _kept(self, name: str, opened: Callable[[], ExperienceStore]) -> ExperienceStore:
        if name not in self._open:
            self._open[name] = opened()
        return self._open[name]

    def _feedback(self) -> ExperienceStore | None:
        """Store of feedback on a run that keeps its experiences in memory; None before the first feedback.

        Opened for writing: the file may exist before its tables do.
        """
        if not (self._has_url or (self.run_dir / DATABASE_FILE).is_file()):
            return None
        return self._kept("feedback", lambda: create_run_store(self.run_dir))

    @cached_property
    def _has_url(self) -> bool:
        return database_url(self.run_dir) is not None


def _read(file: Path) -> MemoryStore:
    """Read a Parquet file's demonstrations, pairs and ratings."""
    store = MemoryStore()
    store.put(
        [
            group
            for group in read_parquet(file)
            if group.kind in (ExperienceKind.EXPERT, ExperienceKind.PREFERENCE, ExperienceKind.RATED)
        ]
    )
    return store
