"""A judge with OpenAI's chat API, as a process that can be killed, stopped and started again on the same port.

`python judge_server.py PORT` scores a question by a hash of its text; PORT 0 takes a free one. It prints its port.
"""

from __future__ import annotations

import json
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge(BaseHTTPRequestHandler):
    """Answers every question with a score from 0 to 10."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Score a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        score = zlib.crc32(json.dumps(body["messages"]).encode()) % 11
        message = {"role": "assistant", "content": json.dumps({"score": score})}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}
        data = json.dumps(answer | {"usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Prints nothing when a client hangs up."""

    allow_reuse_address = True
    request_queue_size = 128  # connections that arrive together are not reset
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1])), Judge)
    print(server.server_port, flush=True)
    server.serve_forever()
