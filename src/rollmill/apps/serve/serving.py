"""Serves a model to applications: a fixed checkpoint, or a run that trains on their sessions."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from rollmill.apps.serve.endpoint.middleware import AccessRules
from rollmill.apps.serve.endpoint.server import EndpointServer
from rollmill.apps.serve.endpoint.service import ServiceLimits, build_application_service
from rollmill.apps.serve.endpoint.session import EndpointSession, FinishedSession, SessionSink
from rollmill.apps.serve.endpoint.session_journal import SESSIONS_FILE, SessionJournal
from rollmill.apps.serve.session_groups import SessionGrouper
from rollmill.apps.serve.web import open_listener, server_url
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.loader import load_run
from rollmill.config.model import ModelConfig
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.config.workflows import LiveRequestsWorkflow
from rollmill.data.images import PICTURES_FOLDER
from rollmill.data.renderer import Switches
from rollmill.engines.base import RolloutEngine
from rollmill.engines.native.build import build_native
from rollmill.errors import CheckpointError, ConfigError, ModelError
from rollmill.launch import CONFIG, resume, start
from rollmill.models.cpu.step_timing import StepSize, choose_precision
from rollmill.models.load import PolicyModel
from rollmill.models.vision import picture_processor
from rollmill.orchestrator.checkpoint import Checkpoints
from rollmill.orchestrator.live_requests import LiveRequestBatches
from rollmill.orchestrator.manifest import model_files, verifying
from rollmill.orchestrator.setup import choose_device
from rollmill.orchestrator.stages import Stage
from rollmill.rollout.chat import ChatRenderer
from rollmill.startup import ending_signals
from rollmill.supervision.attempt import RunAttempt
from rollmill.trackers.rollout_log import ROLLOUTS_FOLDER, RolloutLog
from rollmill.trackers.run_views import RunView
from rollmill.trainer.parity import load_verified_policy

_RUN_FILES = (".yaml", ".yml")
_MOST_PICTURES = 1 << 30


@dataclass(frozen=True)
class ServerAddress:
    """Listener, access rules and limits of a server. `ready` is called once it listens; `switches` are variables of the
    chat template, beside those of the run, unless a request sets them."""

    listener: socket.socket
    rules: AccessRules
    limits: ServiceLimits
    name: str
    ready: Callable[[], None]
    switches: Switches = field(default_factory=dict)


class SessionFileSink:
    """A SessionSink that writes every session to FOLDER/rollouts/step-N.jsonl, for `load_experiences(FOLDER)`."""

    def __init__(self, folder: Path) -> None:
        self._store = RolloutLog(folder / ROLLOUTS_FOLDER)
        before = [int(path.stem.removeprefix("step-")) for path in self._store.folder.glob("step-*.jsonl")]
        self._last = max(before, default=0)

    def check(self, session: EndpointSession) -> None:
        """No-op: rewards may come later."""

    def take(self, finished: FinishedSession) -> int:
        """Raises RollmillError if the file cannot be written."""
        self._last += 1
        self._store.write(self._last, finished.experiences)
        return 0


def serve_checkpoint(
    source: Path, place: ServerAddress, *, step: int | None = None, record: Path | None = None, device: str = "auto"
) -> None:
    """Serve a checkpoint until SIGINT, SIGTERM or SIGHUP; running requests are completed.

    Args:
        source: a model's folder, a run directory (its newest checkpoint, or that of `step`), or a run file.
        record: folder for committed sessions.

    Raises:
        ConfigError: there is no model at `source`.
        CheckpointError: the run has no checkpoint of that step, or it is damaged.
        ModelError: the checkpoint cannot be used.
    """
    folder = find_checkpoint(source, step)
    where = choose_device(device)
    policy = _load_served(folder, where)
    precision = choose_precision(policy.model, where, StepSize.of_generation())
    engine = build_native(NativeEngineConfig(), policy, RolloutConfig(), precision)
    sampling = SamplingConfig(max_new_tokens=policy.context)
    place = replace(place, switches={**_run_switches(source), **place.switches})
    with keeping_pictures(policy, record):
        asyncio.run(_serve(policy, engine, sampling, place, None if record is None else SessionFileSink(record)))


def _load_served(folder: Path, where: torch.device) -> PolicyModel:
    """Load a checkpoint. Raises ModelError if it cannot be used, or no request could show it pictures that it needs."""
    with verifying(folder, model_files):
        policy = load_verified_policy(ModelConfig(path=folder), texts=(), seed=0, device=where, pictures=True)
    processor = picture_processor(policy.model)
    if processor is not None and processor.single_prompt and policy.tokenizer.chat_template is None:
        raise ModelError(
            f"{folder} cannot be served: {type(policy.model).__name__} reads prompts with pictures only, and requests "
            "show them in chats, for which it has no chat template; put a chat_template.jinja into the folder"
        )
    return policy


class ModelServer:
    """Serves a checkpoint from a thread of this process, from `start` to `stop`; a context manager does both.

    Args:
        source, step, record, device: see `serve_checkpoint`.
        rules, limits: of access.
        name: of the model, in responses.
        port: 0 is any free one.

    Raises like `serve_checkpoint`.
    """

    def __init__(
        self,
        source: Path,
        rules: AccessRules,
        limits: ServiceLimits,
        name: str,
        *,
        port: int = 0,
        step: int | None = None,
        record: Path | None = None,
        device: str = "auto",
    ) -> None:
        folder, where = find_checkpoint(source, step), choose_device(device)
        self._policy = _load_served(folder, where)
        precision = choose_precision(self._policy.model, where, StepSize.of_generation())
        self._engine = build_native(NativeEngineConfig(), self._policy, RolloutConfig(), precision)
        self._record = record
        self._sink = None if record is None else SessionFileSink(record)
        self._listens, self._ended = threading.Event(), asyncio.Event()
        listener = open_listener(rules.host, port)
        self.key = ""  #: the API key that clients give, for whoever starts the server
        self.url = f"{server_url(rules.host, listener)}/v1"  #: base URL for clients of OpenAI's API
        self._place = ServerAddress(listener, rules, limits, name, self._listens.set, _run_switches(source))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollmill-serve", daemon=True)

    def start(self) -> Self:
        """Start answering requests. Raises ConfigError if the web libraries are missing."""
        self._thread.start()
        while not self._listens.wait(0.05) and self._thread.is_alive():
            pass
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self) -> None:
        """Refuse new requests, and return once running ones are answered. May be called twice."""
        if self._loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self if self._thread.is_alive() else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            with keeping_pictures(self._policy, self._record):
                asyncio.run(self._serve())
        except BaseException as error:  # raised by `start`
            self._failure = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        sampling = SamplingConfig(max_new_tokens=self._policy.context)
        async with _served(self._policy, self._engine, sampling, self._place, self._sink):
            await self._ended.wait()
        await self._engine.close()


@contextmanager
def keeping_pictures(policy: PolicyModel, record: Path | None) -> Iterator[None]:
    """Keep the pictures of requests in `record`; without it, the newest ones (at most 1 GiB) until the server ends."""
    processor = picture_processor(policy.model)
    if processor is None:
        yield
    elif record is not None:
        processor.folder = record / PICTURES_FOLDER
        yield
    else:
        with tempfile.TemporaryDirectory(prefix="rollmill-pictures-") as folder:
            processor.folder, processor.folder_bytes = Path(folder), _MOST_PICTURES
            yield


def find_checkpoint(source: Path, step: int | None) -> Path:
    """Find the model's folder. Raises ConfigError or CheckpointError if there is none."""
    if step is not None and not (source / CONFIG).is_file():
        raise ConfigError(f"{source} is not a run directory, so it has no step {step}; leave out --step")
    if source.suffix in _RUN_FILES:
        model = load_run(source).config.model
        if not isinstance(model.path, Path):
            raise ConfigError(f"{source}: a new model is untrained; serve the directory of a run instead")
        return model.path
    if not (source / CONFIG).is_file():
        return source
    checkpoints = Checkpoints(source)
    steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{source} has no {'checkpoint' if step is None else f'step {step}'}; it has: {have}")
    return checkpoints.path(steps[-1] if step is None else step)


def _run_switches(source: Path) -> Switches:
    """Variables of the chat template of a run's rollouts; none for a model's folder."""
    file = source if source.suffix in _RUN_FILES else source / CONFIG
    return load_run(file).config.rollout.chat_template_kwargs if file.is_file() else {}


async def _serve(
    policy: PolicyModel, engine: RolloutEngine, sampling: SamplingConfig, place: ServerAddress, sink: SessionSink | None
) -> None:
    await until_signal(_served(policy, engine, sampling, place, sink))
    await engine.close()


async def until_signal(serving: AbstractAsyncContextManager[None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; a second signal stops at once."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in ending_signals()}
    for number in previous:
        loop.add_signal_handler(number, ended.set)
    async with serving:
        await ended.wait()
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@asynccontextmanager
async def _served(
    policy: PolicyModel,
    engine: RolloutEngine,
    sampling: SamplingConfig,
    place: ServerAddress,
    sink: SessionSink | None,
    journal: SessionJournal | None = None,
) -> AsyncIterator[None]:
    service = build_application_service(
        engine,
        ChatRenderer(policy.tokenizer, policy.eos_ids),
        name=place.name,
        context=policy.context,
        sampling=sampling,
        limits=place.limits,
        sink=sink,
        keys=place.rules.keys,
        journal=journal,
        switches=place.switches,
    )
    server = EndpointServer(service, place.rules, place.listener)
    await server.start()
    place.ready()
    try:
        yield
    finally:
        await server.stop()


def serve_training(
    source: Path,
    place: ServerAddress,
    *,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    view: RunView | None = None,
    attempt: RunAttempt | None = None,
) -> dict[str, Any]:
    """Serve a policy and train it on committed sessions, until `steps` are made or SIGINT; return the summary.

    Args:
        source: a run file, or the directory of such a run to resume.
        attempt: given in the child of a supervisor; one that has begun is resumed.

    Raises:
        ConfigError: the run's workflow is not `live_requests`, or it has several stages.
        RollmillError: the run failed.
        KeyboardInterrupt: the user stopped it; a checkpoint is written.
    """
    is_run = (source / CONFIG).is_file()
    if is_run and (overrides or out is not None):
        raise ConfigError("--set and --out apply when a run is started, not when it is resumed")
    if attempt is not None and attempt.run_dir is not None:
        source, is_run = attempt.run_dir, True
    loaded = load_run(source / CONFIG, out=source) if is_run else load_run(source, overrides, out)
    if len(loaded.stages) > 1 or not isinstance(loaded.stages[0].workflow, LiveRequestsWorkflow):
        raise ConfigError(
            f"{loaded.path}: --train needs one stage with `workflow: live_requests`; other runs have a taskset"
        )

    @asynccontextmanager
    async def serving(stage: Stage) -> AsyncIterator[None]:
        workflow, rollout = stage.config.workflow, stage.config.rollout
        assert isinstance(workflow, LiveRequestsWorkflow)
        assert isinstance(stage.batches, LiveRequestBatches)
        fitted = replace(place, switches={**rollout.chat_template_kwargs, **place.switches})
        groups = SessionGrouper(workflow, rollout.group_size, stage.batches)
        with closing(SessionJournal(stage.context.run_dir / SESSIONS_FILE)) as journal:
            async with _served(stage.policy, stage.engine, rollout, fitted, groups, journal):
                yield

    if is_run:
        return resume(source, view, serving, attempt)
    return start(loaded, out, view, serving, attempt)
