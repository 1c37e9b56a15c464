"""Environment of a container for each rollout, in which tools, programs and rewards work."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from rollmill.config.environments import EnvironmentSection
from rollmill.errors import ConfigError
from rollmill.types import SEALED, Task


class ContainerEnvironment(EnvironmentSection):
    """A container for each rollout, which its tools, programs and rewards share (extra `containers`)."""

    needs_extra = ("containers", "docker")
    containers: ClassVar[bool] = True

    name: Literal["container"] = "container"
    time_limit_s: float = Field(60.0, gt=0)
    """Timeout of a command of a workflow of your own that gives none; tools and rewards have theirs."""
    image: str | None = None
    """Image of the containers, as the engine knows it; it is fetched if it is not there. A task may name its own."""
    dockerfile: Path | None = None
    """Folder with a Dockerfile, from which the image is built. Either this or `image`."""
    prepare: str | None = None
    """Shell command that is run once, with `files` in place; rollouts start from a snapshot of its container."""
    files: dict[str, Path] = {}
    """Files and folders of this machine that are copied into each container, by their path there."""
    folder: str | None = Field(None, pattern="^/")
    """Working folder of commands. Default: the image's."""
    user: str | None = None
    """User (or `UID:GID`) that commands run as. Default: the image's."""
    variables: dict[str, str] = {}
    """Environment variables that commands get, in addition to the image's."""
    cpus: float = Field(1.0, gt=0)
    """CPU cores of a container."""
    memory_mb: int = Field(1024, ge=8)
    """Memory of a container, MiB; a command that needs more is killed."""
    pids: int = Field(256, ge=8)
    """Maximum number of processes and threads in a container."""
    disk_mb: int | None = Field(None, ge=1)
    """Maximum of what a container writes to its disk, MiB: by the engine where its storage can (overlay on xfs with
    quotas); elsewhere no file may be larger, and a command that passes the limit is killed."""
    network: Literal["none", "bridge", "host"] = "none"
    """Network of a container: none; a private one, with a way out; or this machine's."""
    lifetime_s: float = Field(7200.0, gt=0)
    """A container ends by itself after this time, whatever happens to the run."""
    at_once: int = Field(16, ge=1)
    """Maximum number of containers at the same time, without those kept ready; other rollouts wait."""
    warm: int = Field(0, ge=0)
    """Number of started containers that are kept ready, so that a rollout does not wait for a start. Not for tasks with
    an image of their own."""
    engine: str = Field("auto", pattern="^(auto|docker|podman|(unix|tcp|http|https|ssh|npipe)://.+)$")
    """Engine of containers. `auto`: what DOCKER_HOST names, else Docker's socket, else podman's, else the command
    podman, as a service of the run's own. `docker` and `podman` are these alone; or give the URL of a socket."""
    runtime: str | None = None
    """Program of the engine that starts containers, such as `runc`, `crun` or `runsc`. Default: the engine's, but
    `runc` for a podman of the run's own on a machine with both versions of control groups, where `crun` fails."""
    ulimits: dict[str, int] = {}
    """Limits of each process by name, such as {nofile: 4096, nproc: 1000}."""
    build_s: float = Field(1800.0, gt=0)
    """Timeout for fetching or building an image, and for `prepare`."""

    def unused_keys(self) -> dict[str, str]:
        if self.processes:
            return {"processes": "not honoured by `container`, whose rollouts are apart anyway; remove it"}
        return super().unused_keys()

    def conflicts(self) -> dict[str, str]:
        if self.image is not None and self.dockerfile is not None:
            return {"dockerfile": "`image` and `dockerfile` both give the image; remove one of them"}
        for path in self.files:
            if not path.startswith("/"):
                return {"files": f"expected paths in the container that begin with /, found `{path}`"}
        return {}

    def of_task(self, task: Task) -> ContainerEnvironment:
        """Returns the section for a task, which may name an image and limits of its own.

        Raises ConfigError if the task's are wrong, or there is no image.
        """
        own: dict[str, Any] = task.metadata.get(SEALED, {}).get("container", {})
        if own:
            image = {"image": None, "dockerfile": None} if own.keys() & {"image", "dockerfile"} else {}
            try:
                section = type(self).model_validate(self.model_dump() | image | own)
            except ValidationError as error:
                raise ConfigError(f"task {task.id}: its container is described wrongly: {error}") from error
        else:
            section = self
        if section.image is None and section.dockerfile is None:
            raise ConfigError(
                f"environment: task {task.id} names no image of its own; give environment.image or .dockerfile"
            )
        return section
