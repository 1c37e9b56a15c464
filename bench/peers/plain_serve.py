"""A plain server: FastAPI on uvicorn as they come, which tokenizes prompts where it reads them.

It answers with the prompt's number of tokens instead of generating, so it has less to do than ours.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from transformers import AutoTokenizer

from rollmill.apps.serve.web import open_listener, server_url

CONTEXT = 4096


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    app = FastAPI()

    def count(text: str) -> dict[str, int]:
        tokens = len(tokenizer.encode(text))
        if tokens >= CONTEXT:
            raise HTTPException(400, f"the prompt has {tokens} tokens")
        return {"tokens": tokens}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> dict[str, int]:
        return count(body["prompt"])

    @app.post("/v1/chat/completions")
    async def chats(body: dict[str, Any]) -> dict[str, int]:
        return count("".join(message["content"] for message in body["messages"]))

    listener = open_listener("127.0.0.1", 0)
    print(server_url("127.0.0.1", listener), flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()
