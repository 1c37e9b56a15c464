"""The table of allowed system calls, the filter compiled from it, and what running programs meet."""

from __future__ import annotations

import asyncio
import errno
import platform
import random
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import becomes_childless

from rollmill_sandbox import Sandbox
from rollmill_sandbox.allowed_syscalls import ABSENT, ALLOWED, FIRST_UNKNOWN, OWN_PID, FilterKind
from rollmill_sandbox.backend import BackendName
from rollmill_sandbox.backend_selection import SAFE_BACKENDS
from rollmill_sandbox.seccomp import ALLOW, ASK, AUDIT_ARCH, ERRNO, KILL_PROCESS, answer_of, build_filter
from rollmill_sandbox.syscall_check import KINDS, NUMBERS, build_probes, check_syscalls, probe
from rollmill_sandbox.syscalls import DENIED

MACHINES = ("x86_64", "aarch64")
FILTERS: list[FilterKind] = ["one", "many", "alone"]
PID = 4321
TESTED = sorted({test.argument for call in ALLOWED for test in call.tests})
INTERESTING = sorted(
    {value ^ bit for call in ALLOWED for test in call.tests for value in (*test.values, test.mask) for bit in (0, 1)}
)
WORDS = st.one_of(
    st.sampled_from([*INTERESTING, PID, 0xFFFFFFFF]),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(INTERESTING).map(lambda value: value | 1 << 32),
)
ARGUMENTS = st.tuples(*[WORDS] * 6)


def run_filter(code: bytes, architecture: int, number: int, arguments: tuple[int, ...]) -> int:
    """Return the answer of a filter, as the kernel's interpreter of classic BPF would."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments)
    steps = list(struct.iter_unpack("<HBBI", code))
    place = accumulator = 0
    while True:
        operation, if_true, if_false, value = steps[place]
        place += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:
                accumulator &= value
            case 0x05:
                place += value
            case 0x15:
                place += if_true if accumulator == value else if_false
            case 0x35:
                place += if_true if accumulator >= value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"operation {operation:#x}")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", FILTERS)
@given(number=st.one_of(st.integers(0, 520), st.integers(0, 0xFFFFFFFF)), arguments=ARGUMENTS)
def test_a_filter_answers_as_the_table(kind: FilterKind, machine: str, number: int, arguments: tuple[int, ...]) -> None:
    code = build_filter(kind, machine, PID)
    found = run_filter(code, AUDIT_ARCH[machine], number, arguments)
    assert found == answer_of(kind, machine, PID, number, arguments)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", FILTERS)
def test_a_filter_answers_as_the_table_for_all_that_is_checked(kind: FilterKind, machine: str) -> None:
    code = build_filter(kind, machine, OWN_PID)
    for each in build_probes(kind, machine):
        assert run_filter(code, AUDIT_ARCH[machine], each.number, each.arguments) == each.answer, each


def test_a_filter_that_only_logs_refuses_no_known_call() -> None:
    """It is for finding the calls that programs make, and still answers tested arguments as the table says."""
    code = build_filter("one", "x86_64", log_only=True)
    calls = {"bpf": (DENIED["bpf"][0], 0x7FFC0000), "read": (0, ALLOW), "socketpair": (53, ERRNO | 1)}
    for number, answer in calls.values():
        assert run_filter(code, AUDIT_ARCH["x86_64"], number, (0,) * 6) == answer


def test_locks_between_processes_are_refused_where_the_kernel_cannot_ask() -> None:
    for asks, answer in ((True, ASK), (False, ERRNO | errno.ENOLCK)):
        code = build_filter("many", "x86_64", asks=asks)
        for command in (6, 7):
            assert run_filter(code, AUDIT_ARCH["x86_64"], 72, (3, command, 0, 0, 0, 0)) == answer


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_of_another_architecture_ends_the_process(machine: str) -> None:
    code = build_filter("one", machine)
    assert len(code) <= 4096 * 8
    assert run_filter(code, 0x40000003, 20, (0,) * 6) == KILL_PROCESS


def test_only_what_is_listed_is_allowed() -> None:
    """Independently of the code that reads the table: for each kind, the numbers that some arguments can reach."""
    for machine in MACHINES:
        for kind in FILTERS:
            listed = {call.number(machine) for call in ALLOWED if kind in call.kinds}
            code = build_filter(kind, machine, OWN_PID)
            reached = {
                each.number
                for each in build_probes(kind, machine)
                if run_filter(code, AUDIT_ARCH[machine], each.number, each.arguments) == ALLOW
            }
            assert reached == listed - {-1}


def test_the_tables_are_consistent() -> None:
    for column, machine in enumerate(MACHINES):
        for kind in FILTERS:
            numbers = Counter(call.number(machine) for call in ALLOWED if kind in call.kinds)
            numbers.pop(-1, None)
            assert [number for number, count in numbers.items() if count > 1] == []
        allowed = {call.number(machine) for call in ALLOWED} - {-1}
        refused = [pair[column] for pair in (DENIED | ABSENT).values() if pair[column] >= 0]
        assert allowed.isdisjoint(refused)
        assert len(refused) == len(set(refused))
        assert max(allowed) < FIRST_UNKNOWN
    assert all(len(call.reason) > 5 for call in ALLOWED)


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_call_numbers_are_those_of_the_kernels_headers(column: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header}")
    words = [line.split() for line in Path(header).read_text().splitlines() if line.startswith("#define __NR")]
    numbers = {
        name.removeprefix("__NR_").removeprefix("__NR3264_"): int(number)
        for _, name, number, *_ in words
        if number.isdigit()
    }
    numbers["newfstatat"] = numbers.get("newfstatat", numbers.get("fstatat", -1))
    table = DENIED | ABSENT | {call.name: (call.x86_64, call.aarch64) for call in ALLOWED}
    wrong = {name: pair[column] for name, pair in table.items() if numbers.get(name, -1) != pair[column]}
    assert wrong == {}


SOME = (0, 9, 41, 53, 54, 72, 101, 321, 435, 600, 0x40000000 + 41)


@pytest.mark.parametrize("backend", SAFE_BACKENDS)
def test_some_calls_are_answered_as_the_table_says(backend: BackendName) -> None:
    with Sandbox(backend=backend, jobs=8) as sandbox:
        for kind in KINDS[backend]:
            assert asyncio.run(check_syscalls(sandbox, kind, build_probes(kind, numbers=SOME))) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", SAFE_BACKENDS)
def test_all_calls_are_answered_as_the_table_says(backend: BackendName) -> None:
    with Sandbox(backend=backend, jobs=8) as sandbox:
        for kind in KINDS[backend]:
            probes = build_probes(kind)
            assert len({each.number for each in probes}) == len(NUMBERS)
            assert asyncio.run(check_syscalls(sandbox, kind, probes)) == []


def test_calls_that_the_table_gets_wrong_are_named() -> None:
    """The walk finds a call that is refused but should be allowed, one that is allowed but should not, and an end."""
    machine = platform.machine()
    bpf, getpid, exit_group = DENIED["bpf"], (39, 172), (231, 94)
    column = machine == "aarch64"
    wrong = [
        replace(probe("one", machine, bpf[column], (0,) * 6), answer=ALLOW),
        replace(probe("one", machine, getpid[column], (0,) * 6), answer=ERRNO | 1),
        replace(probe("one", machine, exit_group[column], (0,) * 6), answer=ERRNO | 1),
    ]
    with Sandbox(backend="namespaces") as sandbox:
        lines = asyncio.run(check_syscalls(sandbox, "one", wrong))
    assert sorted(line.partition("(")[0] for line in lines) == ["bpf", "exit_group", "getpid"]
    assert any("EPERM; the table says allowed" in line for line in lines)
    assert any("success; the table says EPERM" in line for line in lines)
    assert any("ended its program (ok); the table says EPERM" in line for line in lines)


SEED = 20
RANDOM_CALLS = 4000
RANDOM_MADE = 300


@pytest.mark.slow
@pytest.mark.parametrize("backend", SAFE_BACKENDS)
def test_random_calls_are_answered_as_the_table_says_and_leave_nothing(backend: BackendName) -> None:
    numbers, machine = random.Random(SEED), platform.machine()
    with Sandbox(backend=backend, jobs=8) as sandbox:
        for kind in KINDS[backend]:
            probes = [probe(kind, machine, *_random_call(numbers)) for _ in range(RANDOM_CALLS)]
            refused = [each for each in probes if each.answer != ALLOW]
            made = [each for each in probes if each.answer == ALLOW][:RANDOM_MADE]
            assert len(refused) > RANDOM_CALLS / 4
            assert len(made) == RANDOM_MADE
            assert asyncio.run(check_syscalls(sandbox, kind, refused + made)) == []
        assert sandbox.run_sync("print(1)").stdout == "1\n"
        assert becomes_childless(sandbox.pid(), limit_s=20.0)


def _random_call(numbers: random.Random) -> tuple[int, tuple[int, ...]]:
    number = numbers.choice([numbers.randrange(520), numbers.randrange(1 << 32), numbers.randrange(340)])
    words = [0, 1, (1 << 64) - 1, numbers.getrandbits(64), numbers.getrandbits(12), numbers.choice(INTERESTING)]
    return number, tuple(numbers.choice(words) for _ in range(6))
