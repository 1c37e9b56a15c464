"""Messages on a job's socket: the job in, its outcome out.

A job is pickled, because it comes from the caller. A reply is JSON and bytes, because it comes from the side that runs
untrusted programs. Frames begin with their length, 4 bytes, big endian.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.limits import ProgramResult, SandboxLimits

HEADER = struct.Struct("!I")
CONTROL = struct.Struct("!d")
"""The message that passes a job's socket to the server: the seconds after which the server kills the job."""

EARLY_BINDING = {"LD_BIND_NOW": "1"}
"""Variables of the server alone: symbols of libraries are resolved when it starts, instead of in each program."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program and its inputs."""

    program: str
    stdin: bytes
    files: dict[str, bytes]
    limits: SandboxLimits
    idle_s: float = 0.0
    """Above 0: a session, without a program; the longest wait for its caller."""


@dataclass(frozen=True, slots=True)
class JobReply:
    """The result of a job. `outcome` is a ProgramOutcome, or "broken" with the sandbox's error in stderr."""

    outcome: str
    exit_code: int
    seconds: float
    cpu_seconds: float
    peak_mb: float
    stdout: bytes
    stderr: bytes


def pack_job(job: Job) -> bytes:
    """Pack a job into a frame."""
    body = pickle.dumps(job)
    return HEADER.pack(len(body)) + body


def read_job(receive: Callable[[int], bytes]) -> Job:
    """Read a job through `receive` (at most so many bytes; empty at the end). Raises EOFError if it is cut short."""
    (size,) = HEADER.unpack(_exactly(receive, HEADER.size))
    job: Job = pickle.loads(_exactly(receive, size))
    return job


def pack_reply(reply: JobReply) -> bytes:
    """Pack a reply into a frame."""
    lengths = [len(reply.stdout), len(reply.stderr)]
    words = [reply.outcome, reply.exit_code, reply.seconds, reply.cpu_seconds, reply.peak_mb]
    head = json.dumps(words + lengths).encode()
    return HEADER.pack(len(head)) + head + reply.stdout + reply.stderr


def parse_result(reply: bytes, safe: bool) -> ProgramResult | None:
    """Parse the result in a whole reply; None if it was cut short. Raises SandboxError if the sandbox failed."""
    if len(reply) < HEADER.size or len(reply) < HEADER.size + (size := HEADER.unpack_from(reply)[0]):
        return None
    words: list[Any] = json.loads(reply[HEADER.size : HEADER.size + size])
    output = reply[HEADER.size + size :]
    if len(output) != words[5] + words[6]:
        return None
    stdout, stderr = (part.decode(errors="replace") for part in (output[: words[5]], output[words[5] :]))
    if words[0] == "broken":
        raise SandboxError(f"the sandbox could not start a program: {stderr}")
    return ProgramResult(words[0], words[1], stdout, stderr, words[2], words[3], words[4], safe)


def killed_result(seconds: float, safe: bool = True) -> ProgramResult:
    """Return the result of a program whose sandbox was killed from outside."""
    return ProgramResult("killed", -9, "", "", seconds, 0.0, 0.0, safe)


def _exactly(receive: Callable[[int], bytes], size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = receive(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
