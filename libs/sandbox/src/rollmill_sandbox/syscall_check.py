"""Compares the filter of running programs with the table of allowed system calls, call by call.

Each call is made inside a sandbox, by a program that runs for this alone. A call that the table refuses must fail with
the table's error. A call that the table allows is really made, so that it may end its program, or wait until that is
stopped; it must only not fail as if it were refused.
"""

from __future__ import annotations

import asyncio
import errno
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rollmill_sandbox.allowed_syscalls import ALLOWED, EVERY_BIT, OWN_PID, AllowedCall, ArgumentTest, FilterKind
from rollmill_sandbox.backend import BackendName
from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.sandbox import Sandbox
from rollmill_sandbox.seccomp import ALLOW, ASK, ERRNO, answer_of
from rollmill_sandbox.syscalls import UNFILTERED, find_name

KINDS: dict[BackendName, tuple[FilterKind, ...]] = {"namespaces": ("one", "many"), "landlock": ("alone",), "plain": ()}
"""The kinds of filters that a backend installs."""
NUMBERS: Sequence[int] = (*range(600), 1023, 4096, 0x3FFFFFFF, *range(0x40000000, 0x40000000 + 600), 0xFFFFFFFF)
"""All numbers of current kernels and some beyond, and those of the x32 ABI."""
PROGRAM = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
me = os.getpid()
for place, line in enumerate(sys.stdin.read().splitlines()):
    words = [me if word == "{OWN_PID}" else int(word) for word in line.split()]
    found = libc.syscall(*map(ctypes.c_ulong, words))
    error = ctypes.get_errno() if found == -1 else 0
    if os.getpid() != me:
        os._exit(0)
    os.write(1, b"%d %d\\n" % (place, error))
os._exit(0)
"""
_REFUSED = SandboxLimits(wall_s=30.0, memory_mb=256, disk_mb=8)
_MADE = SandboxLimits(wall_s=0.5, cpu_s=1, memory_mb=256, disk_mb=8)
_AT_ONCE = 8
_KERNEL_REFUSES = frozenset(
    {
        *("setsid", "setpgid", "setgroups", "setrlimit", "prlimit64"),
        *("kill", "tkill", "tgkill"),  # Landlock keeps signals inside
        *("write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate"),  # the sealed stdin
        *("chown", "fchown", "lchown", "fchownat", "chmod", "fchmod", "fchmodat", "utimensat", "link", "linkat"),
    }
)
"""Allowed calls that the kernel itself may answer with EPERM."""
_POINTER = 0x1000
_EVERY_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SyscallProbe:
    """One system call with six arguments, and the table's answer."""

    number: int
    arguments: tuple[int, ...]
    answer: int

    def is_as_expected(self, error: int | None, machine: str) -> bool:
        """True if the error of the call (0: none, None: it did not return) is one that the answer allows."""
        name = find_name(self.number, machine)
        if self.answer in (ALLOW, ASK):
            return error != errno.EPERM or name in _KERNEL_REFUSES
        return error == self.answer ^ ERRNO or (name in UNFILTERED and error != 0)


def build_probes(kind: FilterKind, machine: str = "", numbers: Sequence[int] = ()) -> list[SyscallProbe]:
    """Return several calls of each number: with simple arguments, and with arguments that pass or fail each test."""
    machine = machine or platform.machine()
    tested = {call.number(machine): call for call in ALLOWED if kind in call.kinds}
    probes = []
    for number in numbers or NUMBERS:
        sets: list[tuple[int, ...]] = [(0,) * 6, (_EVERY_64,) * 6, (_POINTER,) * 6]
        if number in tested:
            sets += _sets_of(tested[number])
        probes += [probe(kind, machine, number, arguments) for arguments in dict.fromkeys(sets)]
    return probes


def probe(kind: FilterKind, machine: str, number: int, arguments: tuple[int, ...]) -> SyscallProbe:
    """Return a call with the table's answer. OWN_PID among the arguments is the program's process id."""
    return SyscallProbe(number, arguments, answer_of(kind, machine, OWN_PID, number, arguments))


async def check_syscalls(sandbox: Sandbox, kind: FilterKind, probes: Iterable[SyscallProbe]) -> list[str]:
    """Make the calls in programs of a kind; return a line for each whose result is not the table's.

    Raises SandboxError if the sandbox does not start.
    """
    ordered = sorted(probes, key=_batch_of)
    batches = [list(group) for _, group in groupby(ordered, _batch_of)]
    limit = asyncio.Semaphore(_AT_ONCE)
    found = await asyncio.gather(*(_check_batch(sandbox, kind, batch, limit) for batch in batches))
    return [line for lines in found for line in lines]


def _batch_of(probe: SyscallProbe) -> int:
    """Put all refused calls into one program, and the calls of each allowed number into one."""
    return probe.number if probe.answer in (ALLOW, ASK) else -1


async def _check_batch(
    sandbox: Sandbox, kind: FilterKind, batch: list[SyscallProbe], limit: asyncio.Semaphore
) -> list[str]:
    """Make calls in one program, and go on in another one behind a call that ends it."""
    machine, wrong = platform.machine(), []
    limits = replace(_MADE if batch[0].answer in (ALLOW, ASK) else _REFUSED, processes=4 if kind == "many" else 1)
    while batch:
        lines = "\n".join(" ".join(map(str, (each.number, *each.arguments))) for each in batch)
        async with limit:
            result = await sandbox.run(PROGRAM, lines, limits=limits)
        errors: dict[int, int] = {}
        for line in result.stdout.splitlines():
            if (words := line.split()) and len(words) == 2 and all(word.isdecimal() for word in words):
                errors[int(words[0])] = int(words[1])
        last = len(errors)
        for place, each in enumerate(batch[: last + 1]):
            if not each.is_as_expected(errors.get(place), machine):
                wrong.append(_describe(kind, each, errors.get(place), result.outcome))
        batch = batch[last + 1 :]
    return wrong


def _describe(kind: FilterKind, probe: SyscallProbe, error: int | None, outcome: str) -> str:
    expected = "allowed" if probe.answer in (ALLOW, ASK) else _error_name(probe.answer ^ ERRNO)
    result = f"ended its program ({outcome})" if error is None else _error_name(error)
    call = f"{find_name(probe.number, platform.machine())}({', '.join(map(hex, probe.arguments))})"
    return f"{call} in a program of the kind {kind}: {result}; the table says {expected}"


def _error_name(error: int) -> str:
    return errno.errorcode.get(error, str(error)) if error else "success"


def _sets_of(call: AllowedCall) -> list[tuple[int, ...]]:
    """Return arguments that pass all tests, and for each value of each test, some that pass or fail that one."""
    tests = (*call.tests, *(test for test, _ in (*call.answered, *call.asked)))
    passing = [0] * 6
    for test in call.tests:
        passing[test.argument] |= _word(test, test.values[0])
    sets = [tuple(passing)]
    for test in tests:
        for value in (*test.values, *(other ^ 1 for other in test.values), test.mask, EVERY_BIT):
            arguments = list(passing)
            kept = arguments[test.argument] & (EVERY_BIT if test.upper else EVERY_BIT << 32)
            arguments[test.argument] = kept | _word(test, value)
            sets.append(tuple(arguments))
    return sets


def _word(test: ArgumentTest, value: int) -> int:
    return value << 32 if test.upper else value
