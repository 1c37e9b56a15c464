"""The web application of the tinker interface: paths and bodies as the SDK of the package tinker has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from tinker import types

from rollmill.apps.serve.endpoint.app import add_errors, parse_body
from rollmill.apps.serve.endpoint.middleware import AccessRules, EndpointMiddleware, caller_of
from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.tinker.checkpoints import RunInfo, SavedCheckpoint
from rollmill.apps.serve.tinker.promises import Promise
from rollmill.apps.serve.tinker.service import TinkerService
from rollmill.apps.serve.tinker.wire import PROTOBUF, TinkerRequestError, read_forward_request
from rollmill.apps.serve.web.middleware import ASGIApp

POLL_S = 20.0
"""Seconds that a request for a result waits for it; the SDK gives up after 45."""
MOST_BYTES = 16 * 2**20
_CHUNK_BYTES = 4_000_000  # of a request with data; the SDK splits larger ones
_KINDS: dict[str, types.CheckpointType] = {"weights": "training", "sampler_weights": "sampler"}


class TinkerMiddleware(EndpointMiddleware):
    """Applies the access rules."""

    without_key = ("/health", "/api/v1/healthz")


def make_app(service: TinkerService, rules: AccessRules) -> ASGIApp:
    """Build the application, behind its access rules."""
    app = FastAPI(title="rollmill serve --tinker", docs_url=None, redoc_url=None)
    add_errors(app)
    _add_sessions(app, service)
    _add_models(app, service)
    _add_sampling(app, service)
    _add_runs(app, service)
    _add_state(app, service)
    most = service.limits.most_bytes or MOST_BYTES
    guard = TinkerMiddleware(app, rules, service.gauges, service.rates, most)
    guard.routes = frozenset(route.path for route in app.routes if "{" not in route.path)  # type: ignore[attr-defined]
    return guard


def _post(app: FastAPI, path: str, model: Any, answer: Callable[[Any, str], Any]) -> None:
    """Add a path whose body is one of tinker's request models; `answer` gets it with the client's name."""

    async def handle(request: Request) -> Response:
        body = parse_body(model, await request.body() or b"{}")
        found = answer(body, caller_of(request.scope).client)
        return JSONResponse(found.model_dump(mode="json") if isinstance(found, BaseModel) else found)

    app.add_api_route(f"/api/v1/{path}", handle, methods=["POST"])


def _future(promise: Promise, model_id: str | None = None, sequences: list[str] | None = None) -> dict[str, Any]:
    return {"request_id": promise.id, "model_id": model_id, "sample_sequence_ids": sequences}


def _add_sessions(app: FastAPI, service: TinkerService) -> None:
    def create(body: Any, owner: str) -> Any:
        return types.CreateSessionResponse(session_id=service.create_session(body, owner).id)

    def heartbeat(body: Any, owner: str) -> Any:
        service.session(body.session_id, owner)
        service.drop_idle()
        return types.SessionHeartbeatResponse()

    def sampling(body: Any, owner: str) -> Any:
        return types.CreateSamplingSessionResponse(sampling_session_id=service.create_sampler(body, owner).id)

    _post(app, "create_session", types.CreateSessionRequest, create)
    _post(app, "session_heartbeat", types.SessionHeartbeatRequest, heartbeat)
    _post(app, "create_sampling_session", types.CreateSamplingSessionRequest, sampling)

    @app.post("/api/v1/sessions/{id}/finish")
    async def finish(id: str, request: Request) -> Response:
        service.end(service.session(id, caller_of(request.scope).client))
        return JSONResponse({})

    @app.get("/api/v1/sessions/{id}")
    async def session(id: str, request: Request) -> Response:
        found = service.session(id, caller_of(request.scope).client)
        return _json(
            types.GetSessionResponse(
                training_run_ids=found.models,
                sampler_ids=found.samplers,
                user_metadata=found.user_metadata,
                display_name=found.display_name,
            )
        )


def _add_models(app: FastAPI, service: TinkerService) -> None:
    def later(path: str, model: Any, begin: Callable[[Any, str], Promise]) -> None:
        _post(app, path, model, lambda body, owner: _future(begin(body, owner), getattr(body, "model_id", None)))

    later("create_model", types.CreateModelRequest, service.create_model)
    later("optim_step", types.OptimStepRequest, service.optim_step)
    later("save_weights", types.SaveWeightsRequest, service.save_weights)
    later("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, service.save_weights_for_sampler)
    later("load_weights", types.LoadWeightsRequest, service.load_weights)
    later("unload_model", types.UnloadModelRequest, lambda body, owner: service.unload_model(body.model_id, owner))
    _post(app, "get_info", types.GetInfoRequest, lambda body, owner: service.model_info(body.model_id, owner))

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Response:
        if request.headers.get("content-type") != PROTOBUF or "content-encoding" in request.headers:
            raise ApiError(f"send Content-Type: {PROTOBUF}, without Content-Encoding", code="invalid_request")
        try:
            message = read_forward_request(await request.body())
        except TinkerRequestError as error:
            raise ApiError(str(error), code="invalid_request") from None
        promise = service.forward(message, caller_of(request.scope).client)
        return JSONResponse(_future(promise, message.model_id))

    @app.post("/api/v1/retrieve_future")
    async def retrieve(request: Request) -> Response:
        body: Any = parse_body(types.FutureRetrieveRequest, await request.body())
        promise = service.promises.find(body.request_id, caller_of(request.scope).client)
        found = await service.promises.wait(promise, POLL_S)
        if found is None:
            pending = {"type": "try_again", "request_id": promise.id, "queue_state": "active"}
            return JSONResponse(pending, 408)
        return Response(found.body, media_type=found.media_type)


def _add_sampling(app: FastAPI, service: TinkerService) -> None:
    def sample(body: Any, owner: str) -> Any:
        promise, sequences = service.sample(body, owner)
        return _future(promise, sequences=sequences)

    _post(app, "asample", types.SampleRequest, sample)

    @app.post("/api/v1/cancel_future")
    async def cancel(request: Request) -> Response:
        body: Any = parse_body(types.FutureRetrieveRequest, await request.body())
        service.promises.find(body.request_id, caller_of(request.scope).client).task.cancel()
        return JSONResponse({})

    def join(body: Any, owner: str) -> Any:
        return types.JoinSamplingSessionResponse(client_counter=service.join(body.sampling_session_id, owner))

    _post(app, "join_sampling_session", types.JoinSamplingSessionRequest, join)

    @app.get("/api/v1/samplers/{id}")
    async def sampler(id: str, request: Request) -> Response:
        found = service.sampler(id, caller_of(request.scope).client)
        return _json(
            types.GetSamplerResponse(sampler_id=found.id, base_model=found.base_model, model_path=found.model_path)
        )


def _add_runs(app: FastAPI, service: TinkerService) -> None:
    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> Response:
        body = json.loads(await request.body())
        path = body.get("tinker_path") if isinstance(body, dict) else None
        info = _checkpoint(service, str(path), caller_of(request.scope).client).run
        return _json(
            types.WeightsInfoResponse(
                base_model=info.base_model,
                is_lora=True,
                lora_rank=info.settings.rank,
                train_unembed=False,
                train_mlp=info.settings.mlp,
                train_attn=info.settings.attention,
            )
        )

    @app.get("/api/v1/training_runs")
    async def runs(request: Request, limit: int = 20, offset: int = 0) -> Response:
        found = service.store.runs(caller_of(request.scope).client)
        shown = [_run(saved[-1].run, saved) for saved in found.values()]
        cursor = types.Cursor(offset=offset, limit=limit, total_count=len(shown))
        return _json(types.TrainingRunsResponse(training_runs=shown[offset : offset + limit], cursor=cursor))

    @app.get("/api/v1/training_runs/{id}")
    async def run(id: str, request: Request) -> Response:
        owner = caller_of(request.scope).client
        saved = service.store.of_run(id, owner)
        info = saved[-1].run if saved else service.client(id, owner).info
        return _json(_run(info, saved))

    @app.get("/api/v1/training_runs/{id}/checkpoints")
    async def checkpoints(id: str, request: Request) -> Response:
        saved = service.store.of_run(id, caller_of(request.scope).client)
        return _json(types.CheckpointsListResponse(checkpoints=[_shown(each) for each in saved]))

    @app.get("/api/v1/checkpoints")
    async def all_checkpoints(request: Request, limit: int = 100, offset: int = 0) -> Response:
        runs = service.store.runs(caller_of(request.scope).client).values()
        found = sorted((each for saved in runs for each in saved), key=lambda each: each.created, reverse=True)
        cursor = types.Cursor(offset=offset, limit=limit, total_count=len(found))
        shown = [_shown(each) for each in found[offset : offset + limit]]
        return _json(types.CheckpointsListResponse(checkpoints=shown, cursor=cursor))

    @app.delete("/api/v1/training_runs/{id}/checkpoints/{kind}/{name}")
    async def delete(id: str, kind: str, name: str, request: Request) -> Response:
        owner = caller_of(request.scope).client
        service.store.delete(_checkpoint(service, f"tinker://{id}/{kind}/{name}", owner))
        return JSONResponse({})


def _checkpoint(service: TinkerService, path: str, owner: str) -> SavedCheckpoint:
    try:
        return service.store.find(path, owner)
    except TinkerRequestError as error:
        raise ApiError(str(error), 404, code="not_found") from None


def _run(info: RunInfo, saved: list[SavedCheckpoint]) -> types.TrainingRun:
    last = {each.kind: _shown(each) for each in saved}
    return types.TrainingRun(
        training_run_id=info.run,
        base_model=info.base_model,
        model_owner=info.owner,
        is_lora=True,
        lora_rank=info.settings.rank,
        last_request_time=saved[-1].created if saved else datetime.now(UTC),
        last_checkpoint=last.get("weights"),
        last_sampler_checkpoint=last.get("sampler_weights"),
        user_metadata=info.user_metadata,
    )


def _shown(saved: SavedCheckpoint) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"{saved.kind}/{saved.name}",
        checkpoint_type=_KINDS[saved.kind],
        time=saved.created,
        tinker_path=saved.path,
        size_bytes=saved.bytes,
        user_metadata=saved.user_metadata,
    )


def _add_state(app: FastAPI, service: TinkerService) -> None:
    config = types.ClientConfigResponse(
        use_pyqwest_transport=False, fwdbwd_max_chunk_bytes_count=_CHUNK_BYTES, sample_join_sampling_session=True
    )
    _post(app, "client/config", types.ClientConfigRequest, lambda body, owner: config)
    dynamic = types.ClientDynamicConfigResponse(sample_cancel_enabled=True)
    _post(app, "client/dynamic_config", types.ClientConfigRequest, lambda body, owner: dynamic)

    @app.post("/api/v1/telemetry")
    async def telemetry() -> Response:
        return JSONResponse({"status": "accepted"})

    @app.get("/api/v1/healthz")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ending" if service.promises.closing else "ok", **service.counts()})

    @app.get("/metrics")
    async def metrics() -> Response:
        service.gauges.under_way.set(service.promises.open)
        return Response(service.gauges.text(), media_type="text/plain; version=0.0.4")

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> Response:
        models = [
            types.SupportedModel(
                model_name=name, max_context_length=base.policy.context, trainable=True, sampleable=True
            )
            for name, base in service.bases.items()
        ]
        return _json(types.GetServerCapabilitiesResponse(supported_models=models))


def _json(model: Any) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
