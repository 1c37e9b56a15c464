"""Two hundred conversations at the same time: no turn is lost, none belongs to another conversation."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
import pytest
from support.endpoints import CLIENT, KEY, running

from rollmill.apps.serve.endpoint.service import ServiceLimits

CONVERSATIONS, TURNS = 200, 5


async def converse(client: openai.AsyncOpenAI, number: int) -> list[list[int]]:
    """A conversation that carries its own marker; the tokens that were answered."""
    own = client.with_options(api_key=f"{KEY}:talk-{number}")
    messages: list[Any] = []
    answered: list[list[int]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"<{number:03d}.{turn}>"})
        extra = {"return_token_ids": True}
        if turn % 2:
            ids, content = list[int](), ""
            stream = await own.chat.completions.create(model="", messages=messages, stream=True, extra_body=extra)
            async for chunk in stream:
                content += chunk.choices[0].delta.content or ""
                ids = getattr(chunk.choices[0], "token_ids", None) or ids
        else:
            made = await own.chat.completions.create(model="", messages=messages, extra_body=extra)
            choice: Any = made.choices[0]
            ids, content = choice.token_ids, choice.message.content or ""
        answered.append(ids)
        messages.append({"role": "assistant", "content": content})
    return answered


@pytest.mark.slow
def test_no_turn_is_lost_or_mixed_up() -> None:
    limits = ServiceLimits(requests=CONVERSATIONS)
    with running(limits=limits, max_new_tokens=12, max_position_embeddings=1024) as site:

        async def everybody() -> list[list[list[int]]]:
            options: dict[str, Any] = {"base_url": site.base_url, "api_key": KEY, "timeout": 300, "max_retries": 0}
            async with openai.AsyncOpenAI(**options) as client:
                return await asyncio.gather(*(converse(client, number) for number in range(CONVERSATIONS)))

        answered = asyncio.run(everybody())
        sessions = [site.service.sessions.find(CLIENT, name=f"talk-{number}") for number in range(CONVERSATIONS)]
        for session in sessions:
            session.rewarded(1.0)
        site.call(site.service.sessions.commit(sessions, site.kept, site.service.chat.decode))
        decode = site.service.chat.decode
        for number, finished in enumerate(site.kept.finished):
            [one] = finished.experiences
            turns = [turn for turn in one.turns if turn.role == "assistant"]
            recorded = [one.token_ids[turn.start : turn.end].tolist() for turn in turns]
            assert recorded == answered[number]
            others = [turn for turn in one.turns if turn.role != "assistant"]
            told = "".join(decode(one.token_ids[turn.start : turn.end].tolist()) for turn in others)
            assert re.findall(r"<(\d+)\.(\d)>", told) == [(f"{number:03d}", str(turn)) for turn in range(TURNS)]
            assert one.action_tokens == sum(map(len, answered[number]))
        assert len(site.kept.finished) == CONVERSATIONS
        assert not site.service.gate.under_way
