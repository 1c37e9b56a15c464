"""Trackers of a user's file: they get every step, again after a resume, and one that fails does not end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_factory import STAGES, evaluation_metrics, rollouts, training_metrics

from rollmill import registry
from rollmill.config import section as parts
from rollmill.config.monitor import MonitorConfig
from rollmill.errors import ConfigError
from rollmill.orchestrator.monitor import Monitor
from rollmill.trackers import PlainView, TrackedRun


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_registered", dict(parts._registered))


def monitor(folder: Path, *trackers: Any) -> Monitor:
    config = MonitorConfig.model_validate({"trackers": trackers, "report": False})
    return Monitor(folder, "demo", STAGES, config, PlainView((folder / "log.txt").open("a")))


def test_it_gets_steps_and_evaluations_and_its_options(tmp_path: Path) -> None:
    built: list[Any] = []

    @registry.tracker
    class Collect:
        def __init__(self, run: TrackedRun, *, tag: str = "") -> None:
            self.run, self.tag, self.seen, self.closed = run, tag, list[tuple[Any, Any]](), False
            built.append(self)

        def write(self, metrics: Any, experiences: Any = ()) -> None:
            self.seen.append((metrics["step"], len(experiences)))

        def close(self) -> None:
            self.closed = True

    first = monitor(tmp_path, {"name": "Collect", "tag": "a"})
    random = np.random.default_rng(0)
    first.step(training_metrics(random, 1), found := rollouts(random, 1))
    first.evaluation(evaluation_metrics(5))
    first.close()
    assert (built[0].run, built[0].tag) == (TrackedRun(tmp_path, "demo"), "a")
    assert (built[0].seen, built[0].closed) == ([(1, len(found)), (5, 0)], True)

    twice = monitor(tmp_path, {"name": "Collect", "tag": "b"}, {"name": "Collect", "tag": "c"})
    twice.evaluation(evaluation_metrics(5))
    twice.close()
    assert [(each.tag, each.seen, each.closed) for each in built[1:]] == [("b", [(5, 0)], True), ("c", [(5, 0)], True)]
    del built[1:]

    again = monitor(tmp_path, "Collect")
    again.resume_at(5)
    again.evaluation(evaluation_metrics(6))
    again.close()
    assert [each.run.resumed_after for each in built] == [None, 5]
    assert built[1].closed
    assert built[1].seen == [(6, 0)]


def test_one_that_fails_is_said_and_not_called_again(tmp_path: Path) -> None:
    calls: list[str] = []

    @registry.tracker
    class Offline:
        def __init__(self, run: TrackedRun) -> None: ...

        def write(self, metrics: Any, experiences: Any = ()) -> None:
            calls.append("write")
            raise ConnectionError("no route")

        def close(self) -> None:
            calls.append("close")

    watch = monitor(tmp_path, "Offline")
    watch.evaluation(evaluation_metrics(0))
    watch.evaluation(evaluation_metrics(5))
    watch.close()
    assert calls == ["write"]
    said = (tmp_path / "log.txt").read_text()
    assert said.count("tracker `Offline` failed and is not used any more: ConnectionError: no route") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_one_that_cannot_be_opened_again_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    @registry.tracker
    class Away:
        def __init__(self, run: TrackedRun) -> None:
            raise ConnectionError("no route")

        def write(self, metrics: Any, experiences: Any = ()) -> None: ...

        def close(self) -> None: ...

    with pytest.raises(ConnectionError):
        monitor(tmp_path, "Away").open_trackers()
    again = monitor(tmp_path, "Away")
    again.resume_at(0)
    again.evaluation(evaluation_metrics(5))
    again.close()
    said = (tmp_path / "log.txt").read_text()
    assert said.count("tracker `Away` failed and is not used any more: ConnectionError: no route") == 1


def test_it_may_have_the_names_of_trl_besides(tmp_path: Path) -> None:
    seen: list[Any] = []

    @registry.tracker
    class Named:
        def __init__(self, run: TrackedRun, *, tag: str = "") -> None: ...

        def write(self, metrics: Any, experiences: Any = ()) -> None:
            seen.append(metrics)

        def close(self) -> None: ...

    watch = monitor(tmp_path, {"name": "Named", "names": "trl", "tag": "a"})
    watch.step({"step": 1, "reward/mean": 0.5}, [])
    watch.close()
    assert seen == [{"step": 1, "reward/mean": 0.5, "train/global_step": 1, "train/reward": 0.5}]


def test_what_is_no_tracker_or_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"test_own.py:\d+: Deaf: a tracker needs a method write"):

        @registry.tracker
        class Deaf:
            def close(self) -> None: ...

    with pytest.raises(ConfigError, match=r"test_own.py:\d+: Idle: an engine needs a method generate"):

        @registry.engine
        class Idle: ...

    with pytest.raises(ConfigError, match="plain: a tracker is a class with the methods write, close"):

        @registry.tracker
        def plain() -> None: ...
