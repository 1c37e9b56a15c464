"""Makes one kind of load on a server for some seconds: `serve_load ADDRESS KIND SECONDS MEGABYTES`.

Prints a line when it has begun, and one with what became of it when it ends.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import httpx

KEY = "sk-bench"
HALF = 1500
_PIECE = "how many apples are there? "


def main() -> None:
    address, kind, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    until = time.monotonic() + seconds
    print("begun", flush=True)
    print(LOADS[kind](address, until), flush=True)


def idle(address: str, until: float) -> str:
    time.sleep(max(0.0, until - time.monotonic()))
    return ""


def prompts(address: str, until: float) -> str:
    prompt = _PIECE * int(float(sys.argv[4]) * 1e6 / len(_PIECE))
    return _together(3, address, "/v1/completions", {"prompt": prompt, "max_tokens": 1}, until)


def chats(address: str, until: float) -> str:
    body = {"messages": [{"role": "user", "content": "how many apples?"}], "max_tokens": 64}
    return _together(32, address, "/v1/chat/completions", body, until)


def half(address: str, until: float) -> str:
    """Connections that send half of a request's headers; how many are open in the end."""
    host, _, port = address.removeprefix("http://").partition(":")
    held = []
    for _ in range(HALF):
        with suppress(OSError):
            made = socket.create_connection((host, int(port)), timeout=30)
            made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localh")
            held.append(made)
    time.sleep(max(0.0, until - time.monotonic()))
    return f"{sum(map(_is_open, held))} of {len(held)} connections still open"


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while part := connection.recv(4096):
            del part
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _together(clients: int, address: str, path: str, body: object, until: float) -> str:
    statuses: Counter[object] = Counter()

    def ask() -> None:
        with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=300) as client:
            while time.monotonic() < until:
                try:
                    statuses[client.post(address + path, json=body).status_code] += 1
                except httpx.TransportError as error:
                    statuses[type(error).__name__] += 1

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return ", ".join(f"{count} x {status}" for status, count in statuses.items())


LOADS: dict[str, Callable[[str, float], str]] = {"idle": idle, "prompts": prompts, "half": half, "chats": chats}

if __name__ == "__main__":
    main()
