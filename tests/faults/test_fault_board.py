"""The fault board: a subset in CI, all of it before a release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import moments
from faults.__main__ import every_fault, main
from faults.board import Fault, Row, run_fault, table
from faults.scene import Services

SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = {
    ("the trainer is killed in an optimizer step", "inline/sqlite"),
    ("the trainer is killed while it writes a checkpoint", "async/sqlite"),
    ("another rank is killed in a step", "ranks/memory"),
    ("the disk is full at a checkpoint", "inline/memory"),
    ("PostgreSQL crashes before a commit and recovers", "inline/postgresql"),
    ("a second `rollmill run` in the same directory", "inline/memory"),
    ("the trainer's clock jumps an hour back", "inline/sqlite"),
}
"""Faults that CI runs: of those to which no other test of CI comes close."""


def _marked(it: Fault) -> pytest.ParameterSet:
    marks = [*SLOW] if (it.name, it.place) in QUICK else [*SLOW, pytest.mark.thorough]
    if it.store == "postgresql" or it.mode == "vllm":
        marks.append(pytest.mark.service)
    return pytest.param(it, id=f"{it.name} [{it.place}]", marks=marks)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    found = Services(tmp_path_factory.mktemp("faults"))
    yield found
    found.close()


@pytest.mark.parametrize("it", map(_marked, every_fault()))
def test_the_run_recovers_or_says_what_failed(it: Fault, services: Services) -> None:
    row = run_fault(it, services)
    if row.outcome == "skipped":
        pytest.skip(row.message)
    assert not row.wrong, row


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3, marks=SLOW),
        pytest.param(220, marks=[pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(3600)]),
    ],
)
def test_a_run_killed_at_any_file_operation_ends_bit_equal(tmp_path: Path, count: int) -> None:
    services = Services(tmp_path)
    try:
        chosen = moments.choose(moments.record(services), count)
        rows = [moments.run_moment(moment, services) for moment in chosen]
    finally:
        services.close()
    assert len(rows) == count
    assert sum(moment.operation.area == "checkpoints" for moment in chosen) * 2 >= count
    assert not [row for row in rows if row.wrong or row.level != "bit-equal"]


def test_quick_faults_are_on_the_board() -> None:
    assert {(it.name, it.place) for it in every_fault()} >= QUICK
    assert len({it.name for it in every_fault()}) >= 40


def test_a_table_has_a_row_for_each_fault() -> None:
    row = Row(
        "a | b", "kills", "inline", "memory", "recovered", "recovered", "bit-equal", 2, message="x\ny", commit="12ab"
    )
    assert table([row]).splitlines()[2] == (
        "| a \\| b | inline, memory | recovered, bit-equal | 2 | 0 | 0 |  | x y | 12ab |"
    )


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (
            ["--only", "Ctrl-C", "--on", "inline"],
            ["kills: Ctrl-C [inline/memory]", "kills: Ctrl-C twice [inline/sqlite]"],
        ),
        (
            ["--only", "no more files fit", "--family", "disks"],
            ["disks: no more files fit on the disk [inline/memory]"],
        ),
    ],
)
def test_parts_of_the_board_are_chosen(
    arguments: list[str], shows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == shows
    assert main(["--only", "no such fault"]) == 2
