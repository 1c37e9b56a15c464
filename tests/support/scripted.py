"""An engine with a script in place of a model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np

from rollmill.engines.base import GenerationRequest
from rollmill.errors import ContextLengthError
from rollmill.rollout.chat import ChatRenderer
from rollmill.types import Completion, StopReason


class Scripted:
    """An engine that says its lines one after the other, each ended by EOS or by a stop string."""

    version = 0

    def __init__(self, chat: ChatRenderer, *lines: str, room: int = 10**6) -> None:
        self._chat, self._lines, self._room = chat, list(lines), room
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if len(request.prompt_ids) > self._room:
            raise ContextLengthError("the prompt is too long")
        self.requests.append(request)
        return [self._completion(request, self._lines.pop(0), index) for index in range(request.n)]

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        for completion in await self.generate(request):
            yield completion

    def _completion(self, request: GenerationRequest, line: str, index: int) -> Completion:
        stop = next((each for each in request.sampling.stop if line.endswith(each)), None)
        ids = self._chat.encode(line) + ([] if stop else [self._chat.tokenizer.eos_token_id])
        tokens, zeros = np.array(ids, np.int32), np.zeros(len(ids), np.float32)
        reason = StopReason.STOP if stop else StopReason.EOS
        text = line[: len(line) - len(stop or "")]
        return Completion(
            np.array(request.prompt_ids, np.int32), tokens, zeros, tokens * 0, zeros, text, reason, 0, index
        )

    def prompts(self) -> list[str]:
        """What was asked, as text."""
        return [self._chat.decode(list(each.prompt_ids)) for each in self.requests]
