"""An engine with Docker's API: its images, the containers that this process starts, and those that others left."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rollmill.errors import ConfigError, EpisodeError
from rollmill.rollout.containers.archive import folder_digest, pack
from rollmill.rollout.containers.service import answers, default_ulimits, podman_service

if TYPE_CHECKING:
    from rollmill.rollout.environments.builtin.container import ContainerEnvironment

OWNER, COMMAND = "rollmill.owner", "rollmill.command"
"""Labels of containers: the process that started it, and its command line."""
_REPOSITORY = "localhost/rollmill"
_REMEDY = (
    "install podman (apt-get install podman) or Docker, start Docker's service, or name a socket by DOCKER_HOST or "
    "environment.engine"
)
SOCKETS = {
    "docker": ["/var/run/docker.sock"],
    "podman": [f"{folder}/podman/podman.sock" for folder in ("/run", f"/run/user/{os.getuid()}")],
}
"""Places where engines of this machine listen."""
_CALL_S = 120.0
# Sleeps for its life, and reaps processes that have lost their parent, as the first process of a container has to.
_MAIN = ["/bin/sh", "-c", 'trap "exit 0" TERM; sleep "$1" & wait $!', "sh"]


def find_engine(engine: str) -> str:
    """Returns the URL of an engine's socket, or `podman`: the command, as a service of this process's own.

    Raises ConfigError with the remedy if there is none.
    """
    if "://" in engine:
        return engine
    if engine == "auto" and os.environ.get("DOCKER_HOST"):
        return os.environ["DOCKER_HOST"]
    for path in SOCKETS["docker"] + SOCKETS["podman"] if engine == "auto" else SOCKETS[engine]:
        if answers(path):
            return f"unix://{path}"
    if engine != "docker" and shutil.which("podman"):
        return "podman"
    wanted = {"auto": "engine of containers", "docker": "socket of Docker", "podman": "podman"}[engine]
    raise ConfigError(f"environment.engine: there is no {wanted} here; {_REMEDY}")


class ContainerEngine:
    """A connection to an engine. Methods block, and any number of threads may call them.

    Raises ConfigError if the library or the engine is not there.
    """

    def __init__(self, engine: str = "auto", runtime: str | None = None) -> None:
        try:
            import docker as docker
        except ImportError as error:
            text = (
                "the environment `container` needs the library docker; install it: pip install 'rollmill[containers]'"
            )
            raise ConfigError(text) from error
        self._engine, self._runtime = find_engine(engine), runtime
        self.own_service = self._engine == "podman"
        self._clients = threading.local()  # connections to it are not shared by threads
        self._images: dict[str, str] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        try:
            self.version = self.api.version()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"environment.engine: {self._engine} does not answer: {error}; {_REMEDY}") from error

    @property
    def url(self) -> str:
        """URL of the socket that it listens on."""
        return podman_service(self._runtime).url() if self.own_service else self._engine

    @property
    def api(self) -> Any:
        """This thread's client with the calls of Docker's API."""
        import docker

        url = self.url
        client, of = getattr(self._clients, "client", (None, ""))
        if of != url:
            client = docker.APIClient(base_url=url, version="auto", timeout=_CALL_S)
            self._clients.client = client, url
        return client

    # -- images ------------------------------------------------------------------------------------------------

    def image(self, section: ContainerEnvironment) -> str:
        """Returns the image that containers start from: fetched, built and prepared, once for all of them.

        Raises ConfigError if it cannot be made.
        """
        key = section.model_dump_json(
            include={"image", "dockerfile", "prepare", "files", "folder", "user", "variables", "network"}
        )
        with self._locks[key]:
            if key not in self._images:
                base = self._built(section) if section.dockerfile is not None else self._fetched(section.image or "")
                self._images[key] = base if section.prepare is None else self._prepared(section, base)
            return self._images[key]

    def _fetched(self, name: str) -> str:
        from docker.errors import APIError, ImageNotFound

        try:
            found: str = self.api.inspect_image(name)["Id"]
            return found
        except ImageNotFound:
            pass
        try:
            self.api.pull(name)
            fetched: str = self.api.inspect_image(name)["Id"]
        except (APIError, ImageNotFound) as error:
            text = f"environment.image: there is no image {name} here, and it cannot be fetched: {_said(error)}"
            raise ConfigError(f"{text}; build it, or correct its name") from error
        return fetched

    def _built(self, section: ContainerEnvironment) -> str:
        from docker.errors import APIError, ImageNotFound

        folder = section.dockerfile
        assert folder is not None
        if not (folder / "Dockerfile").is_file():
            raise ConfigError(f"environment.dockerfile: there is no {folder / 'Dockerfile'}; give the folder of one")
        tag = f"{_REPOSITORY}/built:{folder_digest(folder)[:32]}"
        with suppress(ImageNotFound):
            found: str = self.api.inspect_image(tag)["Id"]
            return found
        said: list[str] = []
        try:
            # not through docker's own reading of .dockerignore and its archive, which may hold special files
            lines = self.api.build(
                fileobj=pack({".": folder}), custom_context=True, tag=tag, rm=True, forcerm=True, decode=True,
                timeout=int(section.build_s), labels={OWNER: ""},
            )  # fmt: skip
            for line in lines:
                said.append(line.get("stream") or line.get("error") or "")
            built: str = self.api.inspect_image(tag)["Id"]
        except (APIError, ImageNotFound, OSError) as error:
            last = "".join(said).strip()[-1500:]
            raise ConfigError(f"environment.dockerfile: {folder} cannot be built: {last or _said(error)}") from error
        return built

    def _prepared(self, section: ContainerEnvironment, base: str) -> str:
        """A snapshot of a container in which `prepare` was run; it is kept for later runs, too."""
        from docker.errors import ImageNotFound

        from rollmill.rollout.containers.container import run_in

        content = {path: folder_digest(source) for path, source in section.files.items()}
        fields = {"prepare", "folder", "user", "variables", "network"}
        text = f"{base}{section.model_dump_json(include=fields)}{sorted(content.items())}"
        tag = f"{_REPOSITORY}/prepared:{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        with suppress(ImageNotFound):
            found: str = self.api.inspect_image(tag)["Id"]
            return found
        id = self._create(section.model_copy(update={"lifetime_s": section.build_s + 60}), base)
        try:
            assert section.prepare is not None
            ended = run_in(self, id, section, ["/bin/sh", "-c", section.prepare], section.build_s)
            if ended.code != 0:
                what = f"took longer than {section.build_s:g} s" if ended.code is None else f"failed ({ended.code})"
                raise ConfigError(f"environment.prepare: it {what}: {ended.output.strip()[-1500:]}")
            repository, _, version = tag.rpartition(":")
            snapshot: str = self.api.commit(id, repository=repository, tag=version)["Id"]
        finally:
            self.remove(id)
        return snapshot

    def images(self) -> list[str]:
        """Names of the images that runs have built or prepared here."""
        named = [name for image in self.api.images() for name in image.get("RepoTags") or []]
        return [name for name in named if name.startswith(_REPOSITORY + "/")]

    def remove_images(self, names: Sequence[str]) -> None:
        """Remove images. Those that are gone, or that containers use, are no error."""
        from docker.errors import APIError

        for name in names:
            with suppress(APIError):
                self.api.remove_image(name)
        self._images.clear()

    # -- containers --------------------------------------------------------------------------------------------

    def start(self, section: ContainerEnvironment) -> str:
        """Start a container with its files; return its id. Raises ConfigError if the engine cannot."""
        image = self.image(section)
        return self._create(section, image)

    def _create(self, section: ContainerEnvironment, image: str) -> str:
        from docker.errors import APIError

        try:
            try:
                id = self._created(section, image, sized=section.disk_mb is not None)
            except APIError as error:
                if "storage" not in str(error):
                    raise
                id = self._created(section, image, sized=False)
            try:
                self.api.start(id)
                if section.files:
                    self.api.put_archive(id, "/", pack(section.files).read())
            except BaseException:
                self.remove(id)
                raise
        except (APIError, OSError) as error:
            text = f"environment: {section.image or section.dockerfile}: a container cannot be started: {_said(error)}"
            hint = "; crun needs one version of control groups: try runtime: runc" if "crun" in str(error) else ""
            raise ConfigError(text + hint) from error
        return id

    def _created(self, section: ContainerEnvironment, image: str, *, sized: bool) -> str:
        limits = (default_ulimits() if self.own_service else {}) | section.ulimits
        if section.disk_mb is not None and not sized:
            limits["fsize"] = section.disk_mb << 20
        options: dict[str, Any] = {
            "network_mode": section.network,
            "nano_cpus": round(section.cpus * 1e9),
            "mem_limit": section.memory_mb << 20,
            "memswap_limit": section.memory_mb << 20,
            "pids_limit": section.pids,
            "ulimits": [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in limits.items()],
            "storage_opt": {"size": f"{section.disk_mb}m"} if sized else None,
            "security_opt": ["no-new-privileges"],
            # a podman of its own has it in its configuration: its API ignores it
            "runtime": None if self.own_service else section.runtime,
        }
        created = self.api.create_container(
            image,
            entrypoint=_MAIN,
            command=[f"{section.lifetime_s:.0f}"],
            user=section.user,
            labels={OWNER: this_process(), COMMAND: " ".join(sys.argv)[:500]},
            environment=section.variables,
            working_dir=section.folder,
            host_config=self.api.create_host_config(**options),
        )
        id: str = created["Id"]
        return id

    def remove(self, id: str) -> None:
        """Kill and remove a container, with all that it wrote. One that is gone is no error."""
        from docker.errors import APIError, NotFound

        for attempt in range(3):
            try:
                self.api.remove_container(id, force=True, v=True)
                return
            except NotFound:
                return
            except APIError:  # podman refuses while it is being stopped
                if attempt == 2:
                    raise
                time.sleep(0.2)

    def written_bytes(self, id: str) -> int:
        """Bytes that a container has written to its disk."""
        api = self.api
        found = api._result(api._get(api._url("/containers/{0}/json", id), params={"size": 1}), True)
        return int(found.get("SizeRw") or 0)

    @contextmanager
    def episode_errors(self, what: str) -> Iterator[None]:
        """Raise the engine's errors as EpisodeError: only the rollout of the container fails."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        try:
            yield
        except (DockerException, RequestException, OSError) as error:
            raise EpisodeError(f"environment `container`: {what}: {_said(error)}") from error

    # -- what processes left -----------------------------------------------------------------------------------

    def containers(self) -> list[OwnedContainer]:
        """All containers that runs have started with this engine."""
        return [
            OwnedContainer(each["Id"], each["Labels"][OWNER], each["Labels"].get(COMMAND, ""), each["State"])
            for each in self.api.containers(all=True, filters={"label": OWNER})
            if each["Labels"].get(OWNER)
        ]

    def collect(self) -> list[OwnedContainer]:
        """Remove the containers of processes of this machine that are gone; return them."""
        left = [each for each in self.containers() if each.abandoned]
        for each in left:
            self.remove(each.id)
        return left


@dataclass(frozen=True, slots=True)
class OwnedContainer:
    """A container that a run has started. `owner` is the process: host, PID namespace, id and time of its start."""

    id: str
    owner: str
    command: str
    state: str

    @property
    def abandoned(self) -> bool:
        """True if its process ran on this machine, and has ended."""
        here, _, _ = this_process().rpartition("/")
        namespace, _, process = self.owner.rpartition("/")
        return namespace == here and process != _process_name(int(process.partition("-")[0]))


def this_process() -> str:
    """Name of this process that no other one has: host, PID namespace, id and time of its start."""
    with suppress(OSError):
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}/{_process_name(os.getpid())}"
    return f"{socket.gethostname()}/pid/{_process_name(os.getpid())}"


def _process_name(pid: int) -> str:
    """Id and start of a process in clock ticks since boot; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else f"{pid}-{fields[19]}"
    except OSError:
        pass
    try:
        return f"{pid}-{psutil.Process(pid).create_time():.0f}" if not Path("/proc/self").exists() else ""
    except psutil.Error:
        return ""


def _said(error: BaseException) -> str:
    """The engine's own words, in one line."""
    text = getattr(error, "explanation", None) or str(error)
    return " ".join(str(text).split())[-800:]
