"""Real servers over toy models, for tests of the endpoint."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

from rollmill.apps.serve.endpoint.middleware import AccessRules, Caller
from rollmill.apps.serve.endpoint.server import EndpointServer
from rollmill.apps.serve.endpoint.service import EndpointService, ServiceLimits, build_application_service
from rollmill.apps.serve.endpoint.session import FinishedSession
from rollmill.apps.serve.web import ConnectionLimits, open_listener
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.config.rollout import RepetitionConfig, SamplingConfig
from rollmill.engines.native import NativeEngine
from rollmill.rollout.chat import ChatRenderer
from support.toys import CONTEXT, toy_model, toy_tokenizer

KEY, CLIENT = "sk-test", "default"
OTHER_KEY = "sk-other"
BOTH = KeyRing([make_key("ann", KEY), make_key("bob", OTHER_KEY)])
"""Two clients."""


@dataclass
class Kept:
    """A sink that keeps what it takes."""

    finished: list[FinishedSession] = field(default_factory=list)

    def check(self, session: Any) -> None:
        """Everything is taken."""

    def take(self, finished: FinishedSession) -> int:
        """Keep it."""
        self.finished.append(finished)
        return 0


@dataclass
class Running:
    """A server that answers, in a thread with an event loop of its own."""

    address: str
    service: EndpointService
    kept: Kept
    loop: asyncio.AbstractEventLoop
    server: EndpointServer

    @property
    def base_url(self) -> str:
        """What OpenAI's clients take."""
        return f"{self.address}/v1"

    def session(self, name: str, client: str = CLIENT) -> Any:
        """An open session, or a new one."""
        return self.service.sessions.of(Caller(client, name))

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def scripted(engine: NativeEngine, tokenizer: Any, texts: Sequence[str | list[int]]) -> None:
    """Make the engine say these texts, one per completion, in the order of requests; then it goes on by itself.

    A text ends with EOS, unless it is given as tokens.

    The tokens are forced where they are sampled, so everything else is as it is with tokens that a model chose.
    """
    left = [
        [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] if isinstance(text, str) else text
        for text in texts
    ]
    of: dict[Any, list[int]] = {}
    sample = engine.core._runner.sample

    def forced(rows: Any, logits_BV: Any, *others: Any) -> Any:
        for row, logits_V in zip(rows, logits_BV, strict=True):
            if row not in of and left and not row.tokens:
                of[row] = left.pop(0)
            if row in of and len(row.tokens) < len(of[row]):
                logits_V[:] = -30.0
                logits_V[of[row][len(row.tokens)]] = 30.0
        return sample(rows, logits_BV, *others)

    engine.core._runner.sample = forced  # type: ignore[method-assign]


def toy_engine(seed: int = 0, **model: Any) -> tuple[NativeEngine, Any]:
    """A random model, with its tokenizer."""
    tokenizer = toy_tokenizer()
    network = toy_model("qwen3", len(tokenizer), seed, **model)
    eos = frozenset([tokenizer.eos_token_id])
    context = int(model.get("max_position_embeddings", CONTEXT))
    return NativeEngine(network, tokenizer, eos_ids=eos, context=context), tokenizer


@contextmanager
def running(
    says: Sequence[str | list[int]] = (),
    *,
    limits: ServiceLimits | None = None,
    key: str | None = KEY,
    keys: KeyRing | None = None,
    connections: ConnectionLimits | None = None,
    body_s: float = 60.0,
    sink: bool = True,
    max_new_tokens: int = 16,
    template: str | None = None,
    host: str = "127.0.0.1",
    repetition: RepetitionConfig | None = None,
    made: tuple[NativeEngine, Any] | None = None,
    switches: dict[str, Any] | None = None,
    **model: Any,
) -> Iterator[Running]:
    """A server over a toy model that first says the texts of `says`; or over an engine that is `made`, and its
    tokenizer. `keys` are those of several clients, in place of `key`.

    Ids of answers, from which their seeds derive, are the same every time: what a random model says, and when it ends,
    must not differ from one run of the tests to the next.
    """
    generator = Random(0)
    engine, tokenizer = made or toy_engine(**model)
    if template is not None:
        tokenizer.chat_template = template
    if says:
        scripted(engine, tokenizer, says)
    limits, kept = limits or ServiceLimits(), Kept()
    keys = keys or (None if key is None else KeyRing([make_key(CLIENT, key)]))
    service = build_application_service(
        engine,
        ChatRenderer(tokenizer, engine._eos_ids),
        name="toy",
        context=engine._context,
        sampling=SamplingConfig(max_new_tokens=max_new_tokens, repetition=repetition),
        limits=limits,
        sink=kept if sink else None,
        keys=keys,
        switches=switches,
    )
    listener = open_listener("127.0.0.1", 0)
    rules = AccessRules(host, keys, connections or ConnectionLimits(), body_s)
    server = EndpointServer(service, rules, listener)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server_of = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, kept, loop, server)
    try:
        server_of.call(server.start())
        with patch(
            "rollmill.apps.serve.endpoint.handler.new_response_id",
            lambda kind: f"{kind}-{generator.getrandbits(128):032x}",
        ):
            yield server_of
    finally:
        server_of.call(server.stop(abort=True))
        server_of.call(engine.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
