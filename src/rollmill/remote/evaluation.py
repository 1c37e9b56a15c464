"""Evaluations that the trainer's process asks for, and an explorer's answers: files in RUN/asked.

000012-1f3a.json           what is asked: the stage and the version of the weights
000012-1f3a.lock           held by the explorer that is at it; another one takes over when that one dies
000012-1f3a.begun          it has these weights and keeps them until the tokens are there
000012-1f3a.answer.json    what it came to
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
    """An evaluation that an explorer makes; see Evaluation."""

    def __init__(self, config: StageConfig, run_dir: Path, stage: int, version: int, heart: HeartbeatWriter) -> None:
        assert config.evaluation is not None
        self._sets, self._deadline_s = config.evaluation.all_sets(), config.rollout.deadline_s
        self._run_dir, self._heart = run_dir, heart
        self._what = f"the evaluation of version {version}"
        self._path = run_dir / EVALUATION_REQUESTS / f"{version:06d}-{uuid.uuid4().hex[:8]}"
        atomic_write(_with(self._path, ".json"), json.dumps({"stage": stage, "version": version}).encode())

    async def generated(self) -> None:
        """Wait until an explorer keeps these weights. Raises DeadlineError."""
        await self._until(lambda: _with(self._path, BEGUN).exists() or _with(self._path, ANSWER).exists())

    async def result(self) -> EvaluationResult:
        """Wait for the answer.

        Raises:
            DeadlineError: none comes; names the explorers.
            RollmillError: the explorer could not evaluate.
        """
        try:
            await self.generated()
            await self._until(_with(self._path, ANSWER).exists)
            return _decode_result(json.loads(_with(self._path, ANSWER).read_text()), self._sets, self._what)
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """It is no longer asked for."""
        for ending in (".json", BEGUN, ANSWER, LOCK):
            _with(self._path, ending).unlink(missing_ok=True)

    async def _until(self, happened: Callable[[], bool]) -> None:
        ends = time.monotonic() + self._deadline_s
        self._heart.set_activity("evaluate", f"an explorer ({self._what})")
        while not happened():
            if time.monotonic() > ends:
                raise DeadlineError(
                    "the trainer", f"an explorer ({self._what})", self._deadline_s, describe_explorers(self._run_dir)
                )
            await asyncio.sleep(POLL_S)


class RemoteEvaluator:
    """Has the weights as they are evaluated by explorers; see Evaluator.

    Args:
        version: of the weights as they are.
    """

    def __init__(
        self, config: StageConfig, run_dir: Path, stage: int, version: Callable[[], int], heart: HeartbeatWriter
    ) -> None:
        self._config, self._run_dir, self._stage = config, run_dir, stage
        self._version, self._heart = version, heart

    def begin(self) -> RemoteEvaluation:
        """Ask for an evaluation of all sets."""
        return RemoteEvaluation(self._config, self._run_dir, self._stage, self._version(), self._heart)

    async def evaluate(self) -> EvaluationResult:
        """Ask, and wait for it. Raises like `RemoteEvaluation.result`."""
        return await self.begin().result()

    def metrics(self) -> list[dict[str, float]]:
        """What happens in environments is told by who acts in them."""
        return []

    def counters(self) -> list[dict[str, float]]:
        """What rewards count is told by who judges."""
        return []

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """An evaluation that this explorer makes, and no other one until it is closed."""

    path: Path
    version: int  #: of the weights in question
    lock: IO[str]

    def begun(self) -> None:
        """Say that the weights are here and stay until the tokens are there."""
        self._write(BEGUN, {})

    @property
    def still_asked(self) -> bool:
        """Whether the trainer still wants to know."""
        return _with(self.path, ".json").exists()

    def answer(self, evaluated: EvaluationResult) -> None:
        """Tell the trainer."""
        sets = [each.to_json() for each in evaluated.sets]
        shown = [encode_experience(each) for each in evaluated.experiences]
        self._write(ANSWER, {"sets": sets, "experiences": shown})

    def fail(self, error: RollmillError) -> None:
        """Tell the trainer that there is no answer."""
        self._write(ANSWER, {"error": str(error)})

    def close(self) -> None:
        """Let others have it."""
        self.lock.close()

    def _write(self, ending: str, content: dict[str, Any]) -> None:
        if self.still_asked:
            atomic_write(
                _with(self.path, ending), (json.dumps(to_jsonable(content, non_finite="name")) + "\n").encode()
            )


def next_request(run_dir: Path, stage: int) -> EvaluationRequest | None:
    """What is asked in a stage, not answered, and not what another explorer is at; the newest first."""
    for path in sorted((run_dir / EVALUATION_REQUESTS).glob("*.json"), reverse=True):
        name = path.with_suffix("")
        if path.name.endswith(ANSWER) or _with(name, ANSWER).exists():
            continue
        with suppress(FileNotFoundError):  # no longer asked
            asked = json.loads(path.read_text())
            if asked["stage"] == stage and (lock := try_lock(_with(name, LOCK))) is not None:
                return EvaluationRequest(name, asked["version"], lock)
    return None


def _with(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _decode_result(answer: dict[str, Any], sets: Mapping[str, EvaluationSet], what: str) -> EvaluationResult:
    if "error" in answer:
        raise RollmillError(f"{what} failed in an explorer: {answer['error']}")
    found = [SetResult.from_json(sets[each["name"]], each) for each in answer["sets"]]
    return EvaluationResult(found, [decode_experience(row) for row in answer["experiences"]])
