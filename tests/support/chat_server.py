"""A real HTTP server with OpenAI's chat API, whose answers a test writes; and a chat model that is a function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rollmill.concurrency import EventLoopThread
from rollmill.rewards.judges.chat import ChatMessage, ChatModelReply, ChatSamplingParams


@dataclass
class Answer:
    """One answer: a reply's text, or another body and status; `drop` closes the connection instead."""

    text: str | None = None
    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    finish: str = "stop"
    delay_s: float = 0.0
    drop: bool = False


Script = Callable[[dict[str, Any]], "Answer | str"]


@dataclass
class ChatServer:
    """`requests` are the bodies so far, in order; `keys` the headers Authorization; `most` were open at once.

    `errors` are those of the script; the first is raised when the server ends.
    """

    url: str
    script: Script
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    open: int = 0
    most: int = 0
    errors: list[Exception] = field(default_factory=list)


class _Server(ThreadingHTTPServer):
    """Prints nothing when a client hangs up: printing a traceback in a thread can make another thread's parser fail."""

    request_queue_size = 128  # with the default of 5, connections that arrive together may be reset

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def chat_server(script: Script | Sequence[Answer | str], port: int = 0) -> Iterator[ChatServer]:
    """A server that answers by a function of the request's body, or with the entries of a list (the last forever)."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
                server.keys.append(self.headers.get("Authorization"))
                server.open += 1
                server.most = max(server.most, server.open)
            try:
                found = script[min(number, len(script) - 1)] if isinstance(script, Sequence) else server.script(body)
            except Exception as error:  # else a client takes it for a lost connection, and waits
                server.errors.append(error)
                found = failing(400, f"the test's script failed: {error!r}")
            answer = Answer(found) if isinstance(found, str) else found
            time.sleep(answer.delay_s)
            with lock:
                server.open -= 1
            if answer.drop or self.path != "/v1/chat/completions":
                self.close_connection = True
                return
            sent = _completion(answer) if answer.body is None else answer.body
            data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
            self.send_response(answer.status)
            for name, value in ({"Content-Type": "application/json"} | answer.headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    httpd = _Server(("127.0.0.1", port), Handler)
    httpd.daemon_threads = True
    httpd.block_on_close = False
    server = ChatServer(f"http://127.0.0.1:{httpd.server_port}/v1", script if callable(script) else lambda body: "")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
    if server.errors:
        raise server.errors[0]


def failing(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    """An error as OpenAI's API gives it."""
    return Answer(status=status, body={"error": {"message": message, "code": code}}, headers=headers)


def shown(body: dict[str, Any]) -> str:
    """All text of a request's messages."""
    contents = [message["content"] for message in body["messages"]]
    parts = [[{"text": each}] if isinstance(each, str) else each for each in contents]
    return "\n".join(part.get("text", "") for content in parts for part in content)


class Scripted:
    """A chat model that is a function of the question's text, the seed and the index."""

    def __init__(self, reply: Callable[[str, int, int], str]) -> None:
        self._reply = reply
        self.loop, self.identity, self.asked = EventLoopThread("scripted"), "scripted", 0

    async def chat(
        self, messages: Sequence[ChatMessage], sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        self.asked += len(indices)
        text = shown({"messages": messages})
        return [ChatModelReply(self._reply(text, sampling.seed, index), "stop", 10, 5) for index in indices]


def _completion(answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }


class ChatProcess:
    """A chat server in a process of its own, which can be killed, stopped and started again at the same address.

    It gives the same answer to all.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._popen: subprocess.Popen[str] | None = None
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start it, at the address that it had."""
        port = self.url.rpartition(":")[2].partition("/")[0] or "0"
        from support.sources import PYTHONPATH  # the process itself, which runs this file, finds no tests

        command = [sys.executable, __file__, port, self._text]
        environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._popen.stdout is not None
        self.url = self._popen.stdout.readline().strip()
        assert self.url

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._popen is not None
        self._popen.send_signal(number)
        if number is signal.SIGKILL:
            self._popen.wait()

    def __enter__(self) -> ChatProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)


if __name__ == "__main__":
    with chat_server([sys.argv[2]], int(sys.argv[1])) as serving:
        print(serving.url, flush=True)
        threading.Event().wait()
