"""A small Hugging Face hub on this machine: repositories are folders, with one commit each."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse


@dataclass
class LocalHub:
    """Serves `models` and `datasets`: folders by id. `requests` are the paths that were asked for."""

    models: dict[str, Path] = field(default_factory=dict)
    datasets: dict[str, Path] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, id: str) -> str:
        """The commit of a repository: of its files' contents."""
        folder = (self.models | self.datasets)[id]
        digest = hashlib.sha1(id.encode())
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request."""
        self.requests.append(path)
        parts = unquote(urlparse(path).path).strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        id, rest = "/".join(parts[:2]), parts[2:]
        folder = getattr(self, kind).get(id)
        if folder is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = self.commit(id)
        if (rest[1] if len(rest) > 1 else "main") not in ("main", "v1", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = [str(each.relative_to(folder)) for each in sorted(folder.rglob("*")) if each.is_file()]
        if api and rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": commit} for name in files
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if api:
            names = [{"rfilename": name} for name in files]
            about = {"id": id, "sha": commit, "siblings": names, "private": False, "gated": False, "tags": []}
            return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = (folder / name).read_bytes()
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content


@contextmanager
def serve_hub(hub: LocalHub) -> Iterator[LocalHub]:
    """Inside, the hub answers at `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self, body: bool = True) -> None:
            status, headers, content = hub.answer(self.path)
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
