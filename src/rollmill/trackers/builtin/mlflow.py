"""Sends metrics and sample completions to MLflow (extra `mlflow`)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import PrivateAttr

from rollmill.config.trackers import ServiceTrackerSection
from rollmill.errors import ConfigError
from rollmill.trackers.metrics_log import Metrics, TrackedRun, numbers
from rollmill.types import Experience

_LONGEST_VALUE = 6000
_BATCH = 100
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MLflowTracker(ServiceTrackerSection):
    """MLflow (extra `mlflow`). A resumed run continues the same run there."""

    needs_extra = ("mlflow", "mlflow")
    name: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    """Tracking server or database, such as `http://localhost:5000` or `sqlite:///mlflow.db`. Default: MLflow's own,
    from `MLFLOW_TRACKING_URI`."""
    experiment: str = "rollmill"
    """Experiment that the run belongs to; it is made if it does not exist."""
    _client: Any = PrivateAttr()
    _id: str = PrivateAttr()

    def setup(self, run: TrackedRun) -> None:
        """Open the run; the values of a new run's run file are its parameters.

        Raises ConfigError if the server cannot be reached, or refuses the run.
        """
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # its default of 7 waits for minutes
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        key = f"mlflow/{self.experiment}"
        try:
            self._client = MlflowClient(self.uri)
            known = run.service_id(key)
            if known is None:
                experiment = self._client.get_experiment_by_name(self.experiment)
                where = experiment.experiment_id if experiment else self._client.create_experiment(self.experiment)
                self._id = self._client.create_run(where, run_name=run.folder.resolve().name).info.run_id
                run.keep_service_id(key, self._id)
                params = [Param(name, value) for name, value in _flatten(run.settings())]
                for start in range(0, len(params), _BATCH):
                    self._client.log_batch(self._id, params=params[start : start + _BATCH])
            else:
                self._id = known
                self._client.update_run(known, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(
                f"monitor.trackers: MLflow at {self.uri or 'its default place'} does not accept the run: {error}"
            ) from error

    def write(self, metrics: Metrics, experiences: Sequence[Experience] = ()) -> None:
        """Log the numbers of a step, and its first completions as text files. `@` becomes `_at_` in names."""
        from mlflow.entities import Metric

        step, now = metrics["step"], int(time.time() * 1000)
        assert isinstance(step, int)
        found = [Metric(_metric_name(name), float(value), now, step) for name, value in numbers(metrics).items()]
        for start in range(0, len(found), 1000):
            self._client.log_batch(self._id, metrics=found[start : start + 1000])
        for index, each in enumerate(experiences):
            text = f"{each.prompt}\n--- completion, reward {each.reward}\n{each.response}\n"
            self._client.log_text(self._id, text, f"completions/step-{step:06d}-{index}.txt")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _metric_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a run file as `trainer.lr` and their text."""
    inside: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        inside = dict(enumerate(value))
    for key, each in inside.items():
        yield from _flatten(each, f"{path}.{key}" if path else str(key))
    if path and not inside:
        yield _NOT_IN_NAMES.sub("_", path), str(value)[:_LONGEST_VALUE]
