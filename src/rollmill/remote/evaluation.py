"""Remote evaluation: requests of the trainer's process and replies of explorers, as files in RUN/asked.

000012-1f3a.json           request: the stage and the version of the weights
000012-1f3a.lock           held by the explorer that evaluates; if it dies, another one takes over
000012-1f3a.begun          the explorer has these weights and keeps them until the tokens are generated
000012-1f3a.answer.json    result
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollmill.config.evaluation import EvaluationSet
from rollmill.config.run import StageConfig
from rollmill.errors import DeadlineError, RollmillError
from rollmill.files import atomic_write, to_jsonable
from rollmill.orchestrator.evaluation import EvaluationResult
from rollmill.orchestrator.evaluation_set import SetResult
from rollmill.remote.run_state import EVALUATION_REQUESTS, describe_explorers, try_lock
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.trackers.rollout_log import decode_experience, encode_experience

POLL_S = 0.05
BEGUN, ANSWER, LOCK = ".begun", ".answer.json", ".lock"


class RemoteEvaluation:
    """An evaluation made by an explorer; see Evaluation."""

    def __init__(
        self, config: StageConfig, run_dir: Path, stage: int, version: int, heartbeat: HeartbeatWriter
    ) -> None:
        assert config.evaluation is not None
        self._sets, self._deadline_s = config.evaluation.all_sets(), config.rollout.deadline_s
        self._run_dir, self._heartbeat = run_dir, heartbeat
        self._what = f"the evaluation of version {version}"
        self._path = run_dir / EVALUATION_REQUESTS / f"{version:06d}-{uuid.uuid4().hex[:8]}"
        atomic_write(_with(self._path, ".json"), json.dumps({"stage": stage, "version": version}).encode())

    async def generated(self) -> None:
        """Wait until an explorer keeps these weights. Raises DeadlineError."""
        await self._until(lambda: _with(self._path, BEGUN).exists() or _with(self._path, ANSWER).exists())

    async def result(self) -> EvaluationResult:
        """Wait for the result.

        Raises:
            DeadlineError: none arrives; names the explorers.
            RollmillError: the explorer could not evaluate.
        """
        try:
            await self.generated()
            await self._until(_with(self._path, ANSWER).exists)
            return _decode_result(json.loads(_with(self._path, ANSWER).read_text()), self._sets, self._what)
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """Withdraw the request."""
        for ending in (".json", BEGUN, ANSWER, LOCK):
            _with(self._path, ending).unlink(missing_ok=True)

    async def _until(self, happened: Callable[[], bool]) -> None:
        ends = time.monotonic() + self._deadline_s
        self._heartbeat.set_activity("evaluate", f"an explorer ({self._what})")
        while not happened():
            if time.monotonic() > ends:
                raise DeadlineError(
                    "the trainer", f"an explorer ({self._what})", self._deadline_s, describe_explorers(self._run_dir)
                )
            await asyncio.sleep(POLL_S)


class RemoteEvaluator:
    """Has explorers evaluate the current weights; see Evaluator.

    Args:
        version: returns the version of the current weights.
    """

    def __init__(
        self, config: StageConfig, run_dir: Path, stage: int, version: Callable[[], int], heartbeat: HeartbeatWriter
    ) -> None:
        self._config, self._run_dir, self._stage = config, run_dir, stage
        self._version, self._heartbeat = version, heartbeat

    def begin(self) -> RemoteEvaluation:
        """Request an evaluation of all sets."""
        return RemoteEvaluation(self._config, self._run_dir, self._stage, self._version(), self._heartbeat)

    async def evaluate(self) -> EvaluationResult:
        """Request an evaluation and wait for it. Raises like `RemoteEvaluation.result`."""
        return await self.begin().result()

    def metrics(self) -> list[dict[str, float]]:
        """Empty: explorers report the metrics of environments."""
        return []

    def counters(self) -> list[dict[str, float]]:
        """Empty: explorers report the counts of rewards."""
        return []

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """A request that this explorer has locked until it is closed."""

    path: Path
    version: int  #: version of the weights to evaluate
    lock: IO[str]

    def begun(self) -> None:
        """Report that the weights are here and are kept until the tokens are generated."""
        self._write(BEGUN, {})

    @property
    def still_asked(self) -> bool:
        """True if the trainer has not withdrawn the request."""
        return _with(self.path, ".json").exists()

    def answer(self, evaluated: EvaluationResult) -> None:
        """Write the result."""
        sets = [each.to_json() for each in evaluated.sets]
        shown = [encode_experience(each) for each in evaluated.experiences]
        self._write(ANSWER, {"sets": sets, "experiences": shown})

    def fail(self, error: RollmillError) -> None:
        """Write an error as the result."""
        self._write(ANSWER, {"error": str(error)})

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()

    def _write(self, ending: str, content: dict[str, Any]) -> None:
        if self.still_asked:
            atomic_write(
                _with(self.path, ending), (json.dumps(to_jsonable(content, non_finite="name")) + "\n").encode()
            )


def next_request(run_dir: Path, stage: int) -> EvaluationRequest | None:
    """Lock the newest request of a stage that has no result and no other explorer; None if there is none."""
    for path in sorted((run_dir / EVALUATION_REQUESTS).glob("*.json"), reverse=True):
        name = path.with_suffix("")
        if path.name.endswith(ANSWER) or _with(name, ANSWER).exists():
            continue
        with suppress(FileNotFoundError):  # withdrawn
            request = json.loads(path.read_text())
            if request["stage"] == stage and (lock := try_lock(_with(name, LOCK))) is not None:
                return EvaluationRequest(name, request["version"], lock)
    return None


def _with(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _decode_result(answer: dict[str, Any], sets: Mapping[str, EvaluationSet], what: str) -> EvaluationResult:
    if "error" in answer:
        raise RollmillError(f"{what} failed in an explorer: {answer['error']}")
    found = [SetResult.from_json(sets[each["name"]], each) for each in answer["sets"]]
    return EvaluationResult(found, [decode_experience(row) for row in answer["experiences"]])
