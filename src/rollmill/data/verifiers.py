"""Tasks of the library verifiers, which runs in a separate Python environment (verifiers_program.py)."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError

PROGRAM = Path(__file__).with_name("verifiers_program.py")
PYTHON = ".venv-verifiers/bin/python"
TASK_INDEX = "verifiers"
"""Key of a task's metadata: its index in the taskset."""
_LIMIT_S = 300.0


def rows(
    taskset: str, size: int | None = None, python: str = PYTHON, options: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows for the tasks of a verifiers taskset, for the workflow `verifiers`.

    Args:
        taskset: the id of an installed package, or FILE.py.
        size: number of tasks; None for all.
        python: interpreter of the environment that has verifiers.
        options: keys of the taskset's configuration.

    Raises:
        ConfigError: the interpreter or the taskset does not exist.
    """
    command = program_command(Path(python))
    requests = f"{json.dumps(program_settings(taskset, options or {}))}\n{json.dumps({'id': 1, 'list': size})}\n"
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=program_environment(),
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(_LIMIT_S, process.kill)
    timer.start()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(requests)
            process.stdin.flush()
            replies = [json.loads(line) for line in (process.stdout.readline(), process.stdout.readline()) if line]
        except BrokenPipeError:
            replies = []
        finally:
            timer.cancel()
            process.kill()
    error = next((reply["error"] for reply in replies if "error" in reply), None)
    if error is not None or len(replies) < 2:
        raise ConfigError(f"verifiers taskset {taskset}: {error or f'{command[0]} ended; its reason is on stderr'}")
    for row in replies[1]["rows"]:
        text = row["prompt"] or f"task {row['index']}"
        yield {"id": f"{taskset}:{row['index']}", "prompt": text, TASK_INDEX: row["index"]}


def program_settings(
    taskset: str,
    options: dict[str, Any],
    *,
    env: dict[str, Any] | None = None,
    harness: str = "rollmill_chat",
    turns: int | None = None,
) -> dict[str, Any]:
    """Settings for the program, sent as its first line."""
    file = Path(taskset).absolute() if taskset.endswith(".py") else None
    return {
        "taskset": taskset if file is None else file.stem,
        "folders": [os.getcwd()] if file is None else [str(file.parent)],
        "options": options,
        "env": env or {},
        "harness": harness,
        "max_turns": turns,
    }


def program_command(python: Path) -> list[str]:
    """The command that starts the program. Raises ConfigError if the interpreter does not exist."""
    if not python.is_file():
        raise ConfigError(f"{python} does not exist; `make verifiers-setup` creates a Python with verifiers")
    return [str(python.absolute()), "-P", str(PROGRAM)]


def program_environment() -> dict[str, str]:
    """Environment variables of the program, without those that would let it import this environment's packages."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    for name in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine
        env[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    return env
