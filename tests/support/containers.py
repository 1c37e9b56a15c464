"""Containers of tests: an image made from Debian's busybox, without a registry, and an engine of podman's."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollmill.config.rollout import SamplingConfig
from rollmill.rollout.containers import Container
from rollmill.rollout.containers.pool import ContainerPool
from rollmill.rollout.environments.builtin.container import ContainerEnvironment
from rollmill.rollout.workflow import Rollout
from rollmill.types import Task

INSTALL = "apt-get install -y podman runc busybox-static"
_BUSYBOX = Path("/bin/busybox")
DOCKERFILE = """FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
RUN mkdir -p /tmp /etc /task /root && chmod 1777 /tmp && echo root:x:0:0:root:/root:/bin/sh > /etc/passwd
WORKDIR /task
"""


def missing() -> str:
    """What a machine lacks for such tests; empty if it lacks nothing."""
    lacks = [name for name in ("podman", "runc") if shutil.which(name) is None]
    return "" if not lacks and _BUSYBOX.exists() else f"podman, runc and busybox-static are not installed: {INSTALL}"


@contextmanager
def no_other_containers() -> Iterator[None]:
    """Wait until no other test process has containers: tests count all that there are."""
    with Path(tempfile.gettempdir(), "rollmill-tests-containers.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def image_folder(folder: Path, more: str = "") -> Path:
    """A folder with the Dockerfile of an image with busybox and `/bin/sh`, and further lines of it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(_BUSYBOX, folder / "busybox")
    (folder / "Dockerfile").write_text(DOCKERFILE + more)
    return folder


def left_over() -> list[str]:
    """Containers of rollmill that there are, seen by the command podman."""
    command = ["podman", "ps", "--all", "--quiet", "--filter", "label=rollmill.owner"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def environment(folder: Path, /, **keys: Any) -> ContainerEnvironment:
    """The section of an environment with the image of a folder, unless another one is named."""
    keys = keys if "image" in keys else {"dockerfile": folder, **keys}
    return ContainerEnvironment.model_validate({"engine": "podman", **keys})


def rollout(task: Task | None = None, number: int = 0) -> Rollout:
    """A rollout whose policy is not asked."""
    nobody: Any = None
    return Rollout(f"g/{number}", task or Task("t", "go"), "g", number, 0, 0, SamplingConfig(), nobody, nobody)


def in_container(section: ContainerEnvironment, test: Callable[[Container], Awaitable[None]]) -> None:
    """Run a test in a container, and remove it."""

    async def run() -> None:
        pool = ContainerPool(section)
        try:
            async with pool.one(rollout()) as container:
                await test(container)
        finally:
            await pool.close()

    asyncio.run(run())
