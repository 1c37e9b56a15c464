"""Attacks that a sandbox runs when it starts; it refuses to serve if one succeeds."""

from __future__ import annotations

from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.limits import ProgramResult, SandboxLimits

LIMITS = SandboxLimits(wall_s=20.0, memory_mb=256)
PROGRAM = r"""
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def allocate():
    bytearray(1 << 30)
def write(path):
    open(path, "w").close()
def another_process():
    if os.getppid() != 1:
        os.kill(os.getppid(), 0)
    open("/proc/1/stat")
attempts = {
    "open a socket": lambda: socket.socket(),
    "fork": lambda: os.fork() or os._exit(0),
    "open a user namespace": lambda: call("unshare", 0x10000000),
    "mount": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "trace another process": lambda: call("ptrace", 16, 1, 0, 0),
    "read the machine's users": lambda: open("/etc/passwd"),
    "read another process": lambda: open("/proc/1/environ"),
    "see other processes": another_process,
    "write to the root": lambda: write("/probe"),
    "write beside Python": lambda: write(os.__file__ + ".probe"),
    "change a file's mode": lambda: os.chmod(os.__file__, 0o777),
    "become root": lambda: os.setuid(0),
    "use more memory than allowed": allocate,
    "raise its limits": lambda: call("setrlimit", 9, (ctypes.c_ulong * 2)(1 << 62, 1 << 62)),
    "use an inherited file": lambda: [os.fstat(number) for number in range(3, 4096) if _open(number)][0],
}
def _open(number):
    try:
        os.fstat(number)
        return True
    except OSError:
        return False
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, MemoryError, IndexError):
        continue
    print(name)
print("done")
"""


def check_probe(result: ProgramResult) -> None:
    """Raise SandboxError unless every attempt of PROGRAM failed."""
    *through, last = result.stdout.splitlines() or [""]
    if result.outcome != "ok" or last != "done":
        raise SandboxError(
            f"the sandbox's probe ended with {result.outcome} ({result.exit_code}): {result.stderr[-500:].strip()}"
        )
    if through:
        raise SandboxError(f"this machine cannot contain programs: the probe could {', '.join(through)}")
