"""`rollmill sandbox`: what backends are worth here, and single programs with their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kernels import lacks

from rollmill.cli import main
from rollmill_sandbox import isolation_check, seccomp, syscall_check
from rollmill_sandbox.allowed_syscalls import FilterKind
from rollmill_sandbox.attacks import ATTACKS, SMALL, Attack

FAILED, USAGE = 1, 2
QUICK = [hostile for hostile in ATTACKS if hostile.name in ("fork", "read /proc", "forks", "stdout", "run a program")]

MISSING = lacks("namespaces") or lacks("landlock")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the walk over all system calls to libs/sandbox/tests."""
    monkeypatch.setattr(syscall_check, "NUMBERS", range(36, 46))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "program.py"


def test_check_says_what_each_backend_is_worth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation_check, "ATTACKS", QUICK)
    assert main(["sandbox", "check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "namespaces  safe      4 of 4 hostile programs contained" in lines
    assert "landlock    safe      4 of 4 hostile programs contained" in lines
    assert "    lacks: one process only: limits.processes has to be 1" in lines
    assert "plain       NOT SAFE" in lines
    assert any(
        re.fullmatch(r"    (\d+) of \1 system calls answered as the table of allowed calls says", x) for x in lines
    )
    assert lines[-1] == "in use: namespaces"


def test_check_fails_where_a_program_gets_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation_check, "ATTACKS", [*QUICK, Attack("a friendly one", "print('BREACH')", limits=SMALL)])
    assert main(["sandbox", "check", "--json"]) == FAILED
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] is None
    assert [(one["backend"], one["safe"], one["through"]) for one in found["backends"]] == [
        ("namespaces", False, ["a friendly one"]),
        ("landlock", False, ["a friendly one"]),
        ("plain", False, []),
    ]


def test_check_fails_where_a_system_call_is_not_answered_as_the_table_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_a_mistake(kind: FilterKind, machine: str, own_pid: int, number: int, arguments: tuple[int, ...]) -> int:
        return seccomp.ALLOW if number == 41 else seccomp.answer_of(kind, machine, own_pid, number, arguments)

    monkeypatch.setattr(isolation_check, "ATTACKS", QUICK)
    monkeypatch.setattr(syscall_check, "answer_of", with_a_mistake)
    assert main(["sandbox", "check"]) == FAILED
    out = capsys.readouterr().out
    assert "    wrong: " in out
    assert "EPERM; the table says allowed\n" in out
    assert out.endswith("no backend is safe here\n")


def test_check_prefers_what_is_safe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    breach = Attack("only there", "print('BREACH')", limits=SMALL, only="namespaces")
    monkeypatch.setattr(isolation_check, "ATTACKS", [*QUICK, breach])
    assert main(["sandbox", "check"]) == 0
    out = capsys.readouterr().out
    assert "    not contained: only there\n" in out
    assert out.endswith("in use: landlock\n")


def test_run_prints_what_the_program_prints(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text("import sys\nprint(input()[::-1])\nprint('e', file=sys.stderr)")
    Path("in.txt").write_text("abc\n")
    assert main(["sandbox", "run", "program.py", "--stdin", "in.txt"]) == 0
    assert capsys.readouterr() == ("cba\n", "e\n")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("1 / 0", [], "ZeroDivisionError"),
        ("import time; time.sleep(99)", ["--wall-s", "0.3"], "ended by the sandbox: timeout after 0.3"),
        ("x = bytearray(1 << 28)", ["--memory-mb", "128"], "ended by the sandbox: memory"),
        ("import numpy", [], "No module named 'numpy'"),
        ("import torch", ["--package", "numpy", "--memory-mb", "2048"], "No module named 'torch'"),
        ("open('/etc/passwd')", ["--backend", "landlock"], "PermissionError"),
    ],
)
def test_a_program_that_does_not_end_well_is_a_failure(
    program: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], said: str
) -> None:
    program.write_text(text)
    assert main(["sandbox", "run", "program.py", *options]) == FAILED
    assert said in capsys.readouterr().err


def test_the_result_as_json(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text("import numpy; print(numpy.ones(3).sum())")
    options = ["--package", "numpy", "--memory-mb", "2048", "--backend", "plain", "--json"]
    assert main(["sandbox", "run", "program.py", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["stdout"], found["safe"], found["backend"]) == ("ok", "3.0\n", False, "plain")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.py"], USAGE, "FILE missing.py: no such file"),
        (["program.py", "--stdin", "missing.txt"], USAGE, "--stdin missing.txt: no such file"),
        (["program.py", "--backend", "docker"], USAGE, "--backend is auto, namespaces, landlock, plain, not 'docker'"),
        (["program.py", "--wall-s", "0"], USAGE, "Limits.wall_s is 0.0; it has to be above 0"),
        (["program.py", "--package", "no_such"], FAILED, "package 'no_such' cannot be allowed in the sandbox"),
    ],
)
def test_wrong_use_says_what_is_wrong(
    program: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    program.write_text("")
    assert main(["sandbox", "run", *arguments]) == code
    assert said in capsys.readouterr().err
