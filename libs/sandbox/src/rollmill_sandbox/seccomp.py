"""The seccomp filter of a program: the table of allowed system calls, in classic BPF (linux/filter.h, linux/seccomp.h).

The filter is a binary search over ranges of numbers with the same answer, so that few instructions run for a call, and
few when the kernel works out at its installation which calls are always allowed.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

from rollmill_sandbox.allowed_syscalls import (
    ABSENT,
    ALLOWED,
    EVERY_BIT,
    FIRST_UNKNOWN,
    OWN_PID,
    AllowedCall,
    ArgumentTest,
    FilterKind,
)

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL_PROCESS, ERRNO, ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_LOG = 0x7FFC0000
_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both architectures are little endian
_FARTHEST = 255
"""The farthest conditional jump."""
_REFUSED = ERRNO | errno.EPERM


def build_filter(
    kind: FilterKind, machine: str = "", own_pid: int = 0, log_only: bool = False, asks: bool = True
) -> bytes:
    """Return the filter as an array of struct sock_filter.

    A call that is not in the table fails with EPERM, one that no table knows with ENOSYS; a call of another
    architecture kills the process. `machine` is "x86_64" or "aarch64", by default this machine's; KeyError for another.
    `own_pid` is the process id of a program of the kind "alone". With `log_only`, calls that are not in the table are
    made and written to the kernel's log (type 1326): for extending the table, never for untrusted programs. Without
    `asks`, calls that the supervisor would admit fail.
    """
    code = _compile(kind, machine or platform.machine(), log_only, asks)
    return code.replace(struct.pack("<I", OWN_PID), struct.pack("<I", own_pid))


def answer_of(kind: FilterKind, machine: str, own_pid: int, number: int, arguments: tuple[int, ...]) -> int:
    """Return what a filter answers to a call: ALLOW, ASK, or ERRNO with the number of an error in its lower half.

    Reads the table directly, so that it can be compared with the compiled filter. `arguments` are six, of 64 bits.
    """
    if number >= FIRST_UNKNOWN or number in _absent(machine):
        return ERRNO | errno.ENOSYS
    call = _calls(kind, machine).get(number)
    if call is None:
        return _REFUSED
    for test, error in call.answered:
        if test.holds(arguments, own_pid):
            return ERRNO | error
    if any(test.holds(arguments, own_pid) for test, _ in call.asked):
        return ASK
    passed = all(test.holds(arguments, own_pid) for test in call.tests)
    return ALLOW if passed else ERRNO | call.refusal


@cache
def _compile(kind: FilterKind, machine: str, log_only: bool, asks: bool) -> bytes:
    refused = _LOG if log_only else _REFUSED
    calls = _calls(kind, machine)
    ranges: list[tuple[int, list[bytes]]] = []
    for number in range(FIRST_UNKNOWN + 1):
        if number == FIRST_UNKNOWN or number in _absent(machine):
            answer = [_step(_RETURN, ERRNO | errno.ENOSYS)]
        elif number in calls:
            answer = _answer_code(calls[number], asks)
        else:
            answer = [_step(_RETURN, refused)]
        if not ranges or ranges[-1][1] != answer:
            ranges.append((number, answer))
    code = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _step(_RETURN, KILL_PROCESS),
        _step(_LOAD, _NUMBER),
        *_search(ranges),
    ]
    return b"".join(code)


@cache
def _calls(kind: FilterKind, machine: str) -> dict[int, AllowedCall]:
    return {call.number(machine): call for call in ALLOWED if kind in call.kinds and call.number(machine) >= 0}


def _absent(machine: str) -> tuple[int, ...]:
    return tuple(numbers[machine == "aarch64"] for numbers in ABSENT.values())


def _search(ranges: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Return code that answers by the loaded number. Each range lasts until the next one's first number."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    first = ranges[middle][0]
    if len(below) <= _FARTHEST:
        return [_step(_AT_LEAST, first, len(below), 0), *below, *above]
    return [_step(_AT_LEAST, first, 0, 1), _step(_JUMP, len(below)), *below, *above]


def _answer_code(call: AllowedCall, asks: bool) -> list[bytes]:
    code = []
    answers = [(test, ERRNO | error) for test, error in call.answered]
    answers += [(test, ASK if asks else ERRNO | error) for test, error in call.asked]
    for test, answer in answers:
        code += [*_load(test), *_equal_any(test.values, 0, 1), _step(_RETURN, answer)]
    for test in call.tests:
        code += [*_load(test), *_equal_any(test.values, 1, 0), _step(_RETURN, ERRNO | call.refusal)]
    return [*code, _step(_RETURN, ALLOW)]


def _load(test: ArgumentTest) -> list[bytes]:
    load = _step(_LOAD, _FIRST_ARGUMENT + 8 * test.argument + 4 * test.upper)
    return [load] if test.mask == EVERY_BIT else [load, _step(_AND, test.mask)]


def _equal_any(values: tuple[int, ...], if_any: int, if_none: int) -> list[bytes]:
    """Compare with each value, and skip so many steps behind the comparisons."""
    last = len(values) - 1
    return [_step(_EQUAL, v, last - n + if_any, if_none if n == last else 0) for n, v in enumerate(values)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
