"""Task folders of Harbor (https://harborframework.com) as rows.

The format is that of harbor 0.25 (schema 1.4 and earlier). What a container of one image cannot do is a bad row: tasks
of several services or steps, for Windows, with a verifier in a container of its own, with GPUs or with MCP servers.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.data.readers import SourceRow, SourceRows
from rollmill.errors import TasksetError
from rollmill.types import SEALED

_FILE = "task.toml"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024}
_VERIFIER_S = 600.0  # as of Harbor
_FOLDERS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"


class _UnsupportedTaskError(ValueError):
    """A task that cannot be done here; the message is the reason."""


def read_harbor(folder: Path) -> SourceRows:
    """Rows of a task folder, or of a folder of task folders, by name: id, prompt, and what is sealed.

    Raises TasksetError if there are none.
    """
    folders = [folder] if (folder / _FILE).is_file() else sorted(each.parent for each in folder.glob(f"*/{_FILE}"))
    if not folders:
        raise TasksetError(f"taskset.harbor: {folder} holds no task folders of Harbor (with a {_FILE}); give another")
    for each in folders:
        try:
            yield _row(each)
        except (_UnsupportedTaskError, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            yield SourceRow(str(each), problem=str(error))


def _row(folder: Path) -> SourceRow:
    config = tomllib.loads((folder / _FILE).read_text("utf-8"))
    environment, verifier, agent = (_table(config, key) for key in ("environment", "verifier", "agent"))
    _require_supported(config, environment, verifier, folder)
    tests, solution = folder / "tests", folder / "solution"
    if not (tests / "test.sh").is_file():
        raise _UnsupportedTaskError(f"there is no {tests / 'test.sh'}")
    container: dict[str, Any] = {"variables": _variables(environment, "environment")}
    if image := environment.get("docker_image"):
        container["image"] = image
    else:
        container["dockerfile"] = str(folder / "environment")
    limits = {
        "cpus": environment.get("cpus"),
        "memory_mb": environment.get("memory_mb") or _megabytes(environment.get("memory")),
        "disk_mb": environment.get("storage_mb") or _megabytes(environment.get("storage")),
        "folder": environment.get("workdir"),
        "build_s": environment.get("build_timeout_sec"),
        "user": None if agent.get("user") is None else str(agent["user"]),
    }
    container |= {key: value for key, value in limits.items() if value is not None}
    if environment.get("network_mode") == "no-network" or environment.get("allow_internet") is False:
        container["network"] = "none"
    grading = {
        "command": f"{_FOLDERS}; chmod +x /tests/test.sh; /tests/test.sh",
        "files": {"/tests": str(tests)},
        "result": "/logs/verifier/reward.json or /logs/verifier/reward.txt",
        "user": str(verifier.get("user") or "0"),
        "variables": _variables(verifier, "verifier"),
        "time_limit_s": float(verifier.get("timeout_sec", _VERIFIER_S)),
        "end_processes": False,  # as in Harbor: what the agent has started may be what is tested
    }
    sealed: dict[str, Any] = {"container": container, "grading": grading}
    if (solution / "solve.sh").is_file():
        sealed["solution"] = {
            "command": f"{_FOLDERS}; chmod +x /solution/solve.sh; /solution/solve.sh",
            "files": {"/solution": str(solution)},
            "variables": _variables(_table(config, "solution"), "solution"),
        }
    prompt = _without_canary((folder / "instruction.md").read_text("utf-8"))
    metadata = {**_table(config, "metadata"), SEALED: sealed}
    return SourceRow(str(folder), {"id": folder.name, "prompt": prompt}, metadata=metadata)


def _require_supported(
    config: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any], folder: Path
) -> None:
    composed = [
        name for name in ("docker-compose.yaml", "docker-compose.yml") if (folder / "environment" / name).exists()
    ]
    separate = verifier.get("environment_mode") == "separate" or "environment" in verifier
    refused = {
        "it has several steps ([[steps]])": config.get("steps"),
        "it is for Windows": str(environment.get("os", "linux")).lower() != "linux",
        f"it has several services ({''.join(composed)})": composed,
        "its verifier runs in a container of its own": separate,
        "it needs GPUs or TPUs": environment.get("gpus") or environment.get("tpu"),
        "its agent needs MCP servers": environment.get("mcp_servers"),
        "its network has a list of hosts that it may reach": environment.get("network_mode") == "allowlist",
        "its container has a health check": environment.get("healthcheck"),
    }
    for reason, found in refused.items():
        if found:
            raise _UnsupportedTaskError(f"{reason}, which is not supported")


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key, {})
    if not isinstance(found, dict):
        raise _UnsupportedTaskError(f"{_FILE}: {key} is no table")
    return found


def _variables(table: Mapping[str, Any], name: str) -> dict[str, str]:
    """Environment variables, with those of this process in place of ${NAME} and ${NAME:-default}."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise _UnsupportedTaskError(f"{name}.env needs the environment variable {match[1]}; set it")
        return found

    return {str(key): _VARIABLE.sub(value, str(text)) for key, text in _table(table, "env").items()}


def _megabytes(size: Any) -> int | None:
    """MiB of a size such as 2G, as earlier schemas write them."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG])B?\s*", str(size), re.IGNORECASE)
    return None if match is None else max(int(float(match[1]) * _UNITS[match[2].upper()]), 1)


def _without_canary(text: str) -> str:
    """The instruction without the marks at its start by which benchmarks are found in training data."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.match(lines[0].strip())):
        lines.pop(0)
    return "\n".join(lines)
