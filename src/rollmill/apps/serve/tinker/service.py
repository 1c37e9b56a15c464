"""The service behind the tinker interface: sessions, the adapters that they train, and the models they sample from."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tinker import types

from rollmill.apps.serve.endpoint.middleware import EndpointMetrics
from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.tinker.adapters import (
    AdapterSettings,
    PromptLogprobs,
    PromptQuestion,
    SamplingModel,
    SharedBase,
    TrainedAdapter,
    adam_settings,
)
from rollmill.apps.serve.tinker.checkpoints import CheckpointStore, RunInfo, SavedCheckpoint
from rollmill.apps.serve.tinker.promises import Promise, PromiseStore, Result, Turns, answer
from rollmill.apps.serve.tinker.wire import PROTOBUF, TinkerRequestError, decode_forward_request, encode_samples
from rollmill.apps.serve.web.keys import KeyRateLimiter
from rollmill.config.rollout import SamplingConfig
from rollmill.errors import EngineError

ValueT = TypeVar("ValueT")
_ENGINES = 2
"""Engines that are kept for sampling, besides those with requests."""
_SNAPSHOTS = 64
"""Unnamed weights that are kept for each model; older ones can no longer be sampled from."""
_MOST_SAMPLES, _MOST_TOP = 1024, 1024


@dataclass(slots=True, eq=False)
class TinkerSession:
    """A client's session, which ends when its heartbeats stay away."""

    id: str
    owner: str
    user_metadata: dict[str, Any]
    display_name: str | None
    seen: float
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class TrainingClient:
    """The server's side of a training client: its adapter, and the order of its requests."""

    info: RunInfo
    session: TinkerSession
    turns: Turns = field(default_factory=Turns)
    adapter: TrainedAdapter | None = None
    snapshots: list[Path] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """The model of a sampling session: a base model, with the adapter in `folder` if there is one."""

    id: str
    owner: str
    base_model: str
    model_path: str | None = None
    settings: AdapterSettings | None = None
    folder: Path | None = None


class TinkerService:
    """Adapters over base models, for several clients that take turns.

    All that trains, and all log-probs of prompts, are computed by one thread, request by request. Engines sample in
    the caller's event loop, each with one adapter.

    Args:
        bases: base models by the names that clients give.
        store: of checkpoints.
    """

    def __init__(
        self, bases: Mapping[str, SharedBase], store: CheckpointStore, limits: ServiceLimits, rates: KeyRateLimiter
    ) -> None:
        self.bases, self.store, self.limits, self.rates = bases, store, limits, rates
        self.gauges = EndpointMetrics()
        self.promises = PromiseStore(limits.requests, limits.deadline_s)
        self._sessions: dict[str, TinkerSession] = {}
        self._clients: dict[str, TrainingClient] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._engines: OrderedDict[tuple[Path, Path | None], SamplingModel] = OrderedDict()
        self._busy: dict[tuple[Path, Path | None], int] = {}
        self._joined: dict[str, int] = {}  # further clients of sampling sessions
        self._loading, self._scoring = asyncio.Lock(), asyncio.Lock()
        self._questions: dict[SamplingModel, list[tuple[PromptQuestion, asyncio.Future[PromptLogprobs]]]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._snapshots = Path(tempfile.mkdtemp(prefix="rollmill-tinker-"))
        self._computing = ThreadPoolExecutor(
            1, "tinker-compute", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )

    async def close(self) -> None:
        """Cancel what is under way, and free everything."""
        await self.promises.close()
        await asyncio.gather(*self._answering, return_exceptions=True)
        for model in self._engines.values():
            await model.engine.close()
        self._computing.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self._snapshots, ignore_errors=True)

    # -- sessions ----------------------------------------------------------------------------------------------

    def create_session(self, request: types.CreateSessionRequest, owner: str) -> TinkerSession:
        """Raises ApiError if there are too many sessions."""
        self.drop_idle()
        if len(self._sessions) >= self.limits.sessions:
            text = f"{len(self._sessions)} sessions are open, at most {self.limits.sessions} are held; end one"
            raise ApiError(text, 429, code="too_many_sessions", retry_s=30)
        session = TinkerSession(
            str(uuid.uuid4()), owner, request.user_metadata or {}, request.display_name, time.monotonic()
        )
        self._sessions[session.id] = session
        return session

    def session(self, id: str, owner: str) -> TinkerSession:
        """Find a session of a client, and note that it is in use. Raises ApiError if there is none."""
        found = self._sessions.get(id)
        if found is None or found.owner != owner:
            raise ApiError(f"there is no session {id!r}; it may have been idle for too long", 404, code="not_found")
        found.seen = time.monotonic()
        return found

    def drop_idle(self) -> None:
        """Drop sessions without a heartbeat, with their models."""
        now = time.monotonic()
        for session in [each for each in self._sessions.values() if now - each.seen > self.limits.idle_s]:
            self.end(session)

    def end(self, session: TinkerSession) -> None:
        """Free a session's models, and what was saved for its samplers without a name."""
        del self._sessions[session.id]
        for name in session.models:
            if (client := self._clients.pop(name, None)) is not None:
                for folder in client.snapshots:
                    shutil.rmtree(folder, ignore_errors=True)
        for name in session.samplers:
            self._samplers.pop(name, None)
            self._joined.pop(name, None)

    def counts(self) -> dict[str, int]:
        """Numbers of what is held."""
        return {"sessions": len(self._sessions), "models": len(self._clients), "under_way": self.promises.open}

    # -- models ------------------------------------------------------------------------------------------------

    def create_model(self, request: types.CreateModelRequest, owner: str) -> Promise:
        """Make a new adapter. Raises ApiError."""
        session = self.session(request.session_id, owner)
        lora = request.lora_config
        if lora is None:
            raise ApiError("only LoRA is trained here; give a lora_config", code="invalid_request", param="lora_config")
        if getattr(request.optimizer_config, "type", "adamw") != "adamw":
            raise ApiError("only AdamW is supported", code="invalid_request", param="optimizer_config")
        base = self._base(request.base_model)
        settings = AdapterSettings(lora.rank, attention=lora.train_attn, mlp=lora.train_mlp)
        name = f"{session.id}:train:{request.model_seq_id}"
        seed = secrets.randbits(31) if lora.seed is None else lora.seed % 2**31

        async def work() -> Result:
            client = self._client_of(session, RunInfo(name, owner, request.base_model, settings, request.user_metadata))
            client.adapter = await self._compute(lambda: TrainedAdapter(base, settings, seed))
            return answer(types.CreateModelResponse(model_id=name))

        return self.promises.make(f"{name}:0", owner, work)

    def _client_of(self, session: TinkerSession, info: RunInfo) -> TrainingClient:
        client = self._clients[info.run] = TrainingClient(info, session)
        session.models.append(info.run)
        return client

    def _base(self, name: str) -> SharedBase:
        found = self.bases.get(name)
        if found is None:
            text = f"there is no base model {name!r}; this server has: {', '.join(self.bases)}"
            raise ApiError(text, 400, code="model_not_found", param="base_model")
        return found

    def client(self, id: str, owner: str) -> TrainingClient:
        """Find the training client of a model. Raises ApiError if there is none."""
        found = self._clients.get(id)
        if found is None or found.info.owner != owner:
            raise ApiError(f"there is no model {id!r}; its session may have ended", 404, code="not_found")
        found.session.seen = time.monotonic()
        return found

    def _in_turn(
        self, id: str, seq_id: int | None, owner: str, work: Callable[[TrainingClient], Awaitable[Result]]
    ) -> Promise:
        client = self.client(id, owner)
        number = f"{seq_id}" if seq_id else f"x{uuid.uuid4().hex}"
        return self.promises.make(f"{id}:{number}", owner, lambda: client.turns.take(seq_id, lambda: work(client)))

    def forward(self, message: Any, owner: str) -> Promise:
        """Compute log-probs and gradients. Raises ApiError."""
        self.rates.check_tokens(owner)

        async def work(client: TrainingClient) -> Result:
            def compute() -> tuple[bytes, int]:
                request = decode_forward_request(message)
                return _adapter(client).forward(request), sum(len(each.tokens) for each in request.data)

            body, tokens = await self._compute(compute)
            self._count_tokens(self.gauges.prompt_tokens, owner, tokens)
            return Result(body, PROTOBUF)

        return self._in_turn(message.model_id, message.seq_id, owner, work)

    def optim_step(self, request: types.OptimStepRequest, owner: str) -> Promise:
        """Take an optimizer step. Raises ApiError."""

        async def work(client: TrainingClient) -> Result:
            if not isinstance(request.optim_params, types.AdamParams):
                raise TinkerRequestError("only AdamParams are supported")
            settings = adam_settings(request.optim_params)
            metrics = await self._compute(lambda: _adapter(client).optim_step(settings))
            return answer(types.OptimStepResponse(metrics=metrics))

        return self._in_turn(request.model_id, request.seq_id, owner, work)

    def model_info(self, id: str, owner: str) -> types.GetInfoResponse:
        """Describe a model; its tokenizer is named by the folder of the base model."""
        info = self.client(id, owner).info
        base = self.bases[info.base_model]
        data = types.ModelData(
            arch=type(base.policy.model).__name__, model_name=info.base_model, tokenizer_id=str(base.folder)
        )
        return types.GetInfoResponse(
            type="get_info",
            model_data=data,
            model_id=id,
            is_lora=True,
            lora_rank=info.settings.rank,
            model_name=info.base_model,
        )

    def unload_model(self, id: str, owner: str) -> Promise:
        """Free a model."""

        async def work(client: TrainingClient) -> Result:
            client.adapter = None
            self._clients.pop(id, None)
            return answer(types.UnloadModelResponse(model_id=id, type="unload_model"))

        return self._in_turn(id, None, owner, work)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_weights(self, request: types.SaveWeightsRequest, owner: str) -> Promise:
        """Write a checkpoint to go on from. Raises ApiError."""

        async def work(client: TrainingClient) -> Result:
            adapter = _adapter(client)
            saved = await self._compute(
                lambda: self.store.save(
                    client.info,
                    "weights",
                    request.path or f"unnamed-{uuid.uuid4().hex[:12]}",
                    lambda folder: adapter.save(folder, optimizer=True),
                    overwrite=request.overwrite,
                    user_metadata=request.user_metadata,
                )
            )
            return answer(types.SaveWeightsResponse(path=saved.path, type="save_weights"))

        return self._in_turn(request.model_id, request.seq_id, owner, work)

    def save_weights_for_sampler(self, request: types.SaveWeightsForSamplerRequest, owner: str) -> Promise:
        """Write weights to sample from: named ones, or for a sampling session of their own. Raises ApiError."""

        async def work(client: TrainingClient) -> Result:
            adapter = _adapter(client)
            if request.path is None:
                folder = self._snapshots / uuid.uuid4().hex
                folder.mkdir()
                await self._compute(lambda: adapter.save(folder, optimizer=False))
                client.snapshots.append(folder)
                while len(client.snapshots) > _SNAPSHOTS:
                    shutil.rmtree(client.snapshots.pop(0), ignore_errors=True)
                number = request.sampling_session_seq_id
                sampler = self._new_sampler(client.session, number, client.info, None, folder)
                return answer(types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler.id))
            name = request.path
            saved = await self._compute(
                lambda: self.store.save(
                    client.info,
                    "sampler_weights",
                    name,
                    lambda folder: adapter.save(folder, optimizer=False),
                    overwrite=True,
                    user_metadata=request.user_metadata,
                )
            )
            return answer(types.SaveWeightsForSamplerResponseInternal(path=saved.path))

        return self._in_turn(request.model_id, request.seq_id, owner, work)

    def load_weights(self, request: types.LoadWeightsRequest, owner: str) -> Promise:
        """Load a checkpoint into a model, or into a new one. Raises ApiError."""
        if request.model_id is not None:
            id = request.model_id

            async def replace(client: TrainingClient) -> Result:
                saved = self._loadable(request, owner)
                adapter = _adapter(client)
                await self._compute(lambda: adapter.load(saved.folder, optimizer=request.optimizer))
                return answer(types.LoadWeightsResponse(path=request.path, model_id=id, type="load_weights"))

            return self._in_turn(id, request.seq_id, owner, replace)
        if request.session_id is None or request.model_seq_id is None:
            raise ApiError("give model_id, or session_id and model_seq_id", code="invalid_request")
        session = self.session(request.session_id, owner)
        name = f"{session.id}:train:{request.model_seq_id}"

        async def create() -> Result:
            saved = self._loadable(request, owner)
            run = saved.run
            base_model = request.base_model or run.base_model
            base = self._base(base_model)
            if base is not self.bases.get(run.base_model, base):
                raise TinkerRequestError(f"{request.path} is an adapter of {run.base_model!r}, not of {base_model!r}")

            def load() -> TrainedAdapter:
                adapter = TrainedAdapter(base, run.settings, 0)
                adapter.load(saved.folder, optimizer=request.optimizer)
                return adapter

            adapter = await self._compute(load)
            info = RunInfo(name, owner, base_model, run.settings, request.user_metadata)
            self._client_of(session, info).adapter = adapter
            return answer(types.LoadWeightsResponse(path=request.path, model_id=name, type="load_weights"))

        return self.promises.make(f"{name}:0", owner, create)

    def _loadable(self, request: types.LoadWeightsRequest, owner: str) -> SavedCheckpoint:
        saved = self.store.find(request.path, owner)
        if request.optimizer and not saved.has_optimizer:
            raise TinkerRequestError(f"{request.path} has no state of an optimizer; load it without")
        return saved

    # -- sampling ----------------------------------------------------------------------------------------------

    def create_sampler(self, request: types.CreateSamplingSessionRequest, owner: str) -> SamplingSession:
        """Make a sampling session for a base model, or for a checkpoint. Raises ApiError."""
        session = self.session(request.session_id, owner)
        number = request.sampling_session_seq_id
        if request.model_path is None:
            base_model = request.base_model or ""
            self._base(base_model)
            return self._new_sampler(session, number, base_model)
        saved = self._found(request.model_path, owner)
        self._base(saved.run.base_model)
        return self._new_sampler(session, number, saved.run, saved.path, saved.folder)

    def _found(self, path: str, owner: str) -> SavedCheckpoint:
        try:
            return self.store.find(path, owner)
        except TinkerRequestError as error:
            raise ApiError(str(error), 404, code="not_found", param="model_path") from error

    def _new_sampler(
        self,
        session: TinkerSession,
        number: int | None,
        run: RunInfo | str,
        path: str | None = None,
        folder: Path | None = None,
    ) -> SamplingSession:
        name = f"{session.id}:sample:{uuid.uuid4().hex if number is None else number}"
        base_model = run if isinstance(run, str) else run.base_model
        settings = None if isinstance(run, str) else run.settings
        sampler = self._samplers[name] = SamplingSession(name, session.owner, base_model, path, settings, folder)
        session.samplers.append(name)
        return sampler

    def sampler(self, id: str, owner: str) -> SamplingSession:
        """Find a sampling session. Raises ApiError if there is none."""
        found = self._samplers.get(id)
        if found is None or found.owner != owner:
            raise ApiError(f"there is no sampling session {id!r}; its session may have ended", 404, code="not_found")
        return found

    def join(self, id: str, owner: str) -> int:
        """Number a further client of a sampling session, from 1 on."""
        self.sampler(id, owner)
        self._joined[id] = self._joined.get(id, 0) + 1
        return self._joined[id]

    def sample(self, request: types.SampleRequest, owner: str) -> tuple[Promise, list[str]]:
        """Sample sequences; returns the promise and the ids of the sequences. Raises ApiError."""
        self.rates.check_tokens(owner)
        sampler = self._sampler_of(request, owner)
        prompt, sampling = _prompt(request), _sampling(request, self._base(sampler.base_model))
        seed = request.sampling_params.seed
        chosen = secrets.randbits(62) if seed is None else seed
        question = PromptQuestion(
            np.array(prompt, np.int32), request.topk_prompt_logprobs, request.prompt_logprobs_last_n
        )
        top, endless = request.topk_sample_logprobs, request.sampling_params.stop == []

        async def work() -> Result:
            model = await self._engine(sampler)
            try:
                try:
                    sequences = await model.sample(prompt, sampling, request.num_samples, chosen, top, endless=endless)
                except EngineError:  # the request fits, so the engine has failed; the next one gets another
                    self._engines.pop(self._key(sampler), None)
                    raise
                known: PromptLogprobs | None = None
                if request.prompt_logprobs or request.topk_prompt_logprobs:
                    known = await self._prompt_logprobs(model, question)
            finally:
                await self._release(sampler)
            self._count_tokens(self.gauges.prompt_tokens, owner, len(prompt))
            self._count_tokens(self.gauges.completion_tokens, owner, sum(len(each.tokens) for each in sequences))
            if known is None:
                return Result(encode_samples(sequences), PROTOBUF)
            return Result(encode_samples(sequences, known.logprobs, known.top if question.top else None), PROTOBUF)

        number = uuid.uuid4().hex if request.seq_id is None else str(request.seq_id)
        id = f"{sampler.id}:{number}"
        return self.promises.make(id, owner, work), [f"{id}:{index}" for index in range(request.num_samples)]

    def _sampler_of(self, request: types.SampleRequest, owner: str) -> SamplingSession:
        if request.sampling_session_id is not None:
            found = self.sampler(request.sampling_session_id, owner)
            session = self._sessions.get(found.id.partition(":")[0])
            if session is not None:
                session.seen = time.monotonic()
            return found
        name = uuid.uuid4().hex
        if request.model_path is not None:
            saved = self._found(request.model_path, owner)
            return SamplingSession(name, owner, saved.run.base_model, saved.path, saved.run.settings, saved.folder)
        return SamplingSession(name, owner, request.base_model or "")

    async def _engine(self, sampler: SamplingSession) -> SamplingModel:
        """The engine of a sampler, which `_release` gives back. Raises TinkerRequestError if its weights are gone."""
        key = self._key(sampler)
        base = self._base(sampler.base_model)
        self._busy[key] = self._busy.get(key, 0) + 1
        try:
            async with self._loading:
                if (found := self._engines.get(key)) is None:
                    if sampler.folder is not None and not sampler.folder.is_dir():
                        raise TinkerRequestError(
                            "these weights are no longer kept; save them with a name to sample from them later"
                        )
                    found = await self._compute(lambda: SamplingModel(base, sampler.settings, sampler.folder))
                    self._engines[key] = found
                self._engines.move_to_end(key)
        except BaseException:
            await self._release(sampler)
            raise
        return found

    def _key(self, sampler: SamplingSession) -> tuple[Path, Path | None]:
        return self._base(sampler.base_model).folder, sampler.folder

    async def _release(self, sampler: SamplingSession) -> None:
        key = self._key(sampler)
        self._busy[key] -= 1
        if not self._busy[key]:
            del self._busy[key]
        idle = [each for each in self._engines if each not in self._busy]
        for each in idle[: max(0, len(idle) - _ENGINES)]:
            await self._engines.pop(each).engine.close()

    # -- helpers -----------------------------------------------------------------------------------------------

    async def _prompt_logprobs(self, model: SamplingModel, question: PromptQuestion) -> PromptLogprobs:
        """Log-probs of a prompt. Those that are asked for while others are computed are computed together."""
        answer: asyncio.Future[PromptLogprobs] = asyncio.get_running_loop().create_future()
        waiting = self._questions.setdefault(model, [])
        waiting.append((question, answer))
        if len(waiting) == 1:
            task = asyncio.ensure_future(self._answer_questions(model))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        return await answer

    async def _answer_questions(self, model: SamplingModel) -> None:
        async with self._scoring:
            asked = self._questions.pop(model)
            try:
                found = await self._compute(lambda: model.prompt_logprobs([question for question, _ in asked]))
            except Exception as error:  # of the requests
                for _, answer in asked:
                    if not answer.done():
                        answer.set_exception(error)
                return
        for (_, answer), result in zip(asked, found, strict=True):
            if not answer.done():
                answer.set_result(result)

    async def _compute(self, work: Callable[[], ValueT]) -> ValueT:
        """Run work in the thread that computes; it is not interrupted once it has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._computing, work)

    def _count_tokens(self, counter: Any, owner: str, count: int) -> None:
        counter.labels(owner).inc(count)
        self.rates.spend_tokens(owner, count)


def _adapter(client: TrainingClient) -> TrainedAdapter:
    if client.adapter is None:
        raise TinkerRequestError(f"the model {client.info.run!r} was not made, or is unloaded")
    return client.adapter


def _prompt(request: types.SampleRequest) -> list[int]:
    """The tokens of a prompt. Raises ApiError if there is something else in it."""
    if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k:
        text = "target_prompt_logprobs and prompt_alt_tokens_k are not supported; use topk_prompt_logprobs"
        raise ApiError(text, code="unsupported_parameter")
    if not all(isinstance(each, types.EncodedTextChunk) for each in request.prompt.chunks):
        raise ApiError("only text is supported in prompts, not images or audio", code="unsupported_parameter")
    tokens: list[int] = request.prompt.to_ints()
    if not tokens:
        raise ApiError("the prompt has no tokens", code="invalid_value", param="prompt")
    return tokens


def _sampling(request: types.SampleRequest, base: SharedBase) -> SamplingConfig:
    """The settings of a request. Raises ApiError for wrong ones."""
    params, tokens, context = request.sampling_params, request.prompt.to_ints(), base.policy.context
    if not 0 <= min(tokens) <= max(tokens) < base.vocabulary:
        raise ApiError(f"the prompt has tokens outside of the vocabulary of {base.vocabulary}", code="invalid_value")
    if len(tokens) >= context:
        text = f"the prompt has {len(tokens)} tokens, and the model's context of {context} leaves no room"
        raise ApiError(text, code="context_length_exceeded", param="prompt")
    if not 1 <= request.num_samples <= _MOST_SAMPLES:
        raise ApiError(f"num_samples is from 1 to {_MOST_SAMPLES}", code="invalid_value", param="num_samples")
    if not 0 <= max(request.topk_sample_logprobs, request.topk_prompt_logprobs) <= _MOST_TOP:
        raise ApiError(f"at most {_MOST_TOP} log-probs are returned for a token", code="invalid_value")
    last = request.prompt_logprobs_last_n
    if last is not None and not 1 <= last < len(tokens):
        raise ApiError("prompt_logprobs_last_n is from 1 to len(prompt) - 1", code="invalid_value")
    stop: Sequence[Any] = [params.stop] if isinstance(params.stop, str) else params.stop or []
    try:
        return SamplingConfig(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            max_new_tokens=context if params.max_tokens is None else params.max_tokens,
            stop=[each for each in stop if isinstance(each, str)],
            stop_token_ids=[each for each in stop if isinstance(each, int)],
        )
    except ValueError as error:
        raise ApiError(f"sampling_params: {error}", code="invalid_value", param="sampling_params") from None
