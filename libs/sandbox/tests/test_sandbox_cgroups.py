"""Control groups: where they may be made, what is written into them, and what their absence says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from kernels import lacks

from rollmill_sandbox import Sandbox, SandboxLimits
from rollmill_sandbox.cgroups import Cgroup, CgroupError, count_oom_kills, find_parent_cgroup

MOUNT = "30 23 0:26 / {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def _tree(root: Path, offers: dict[str, str]) -> str:
    for name, controllers in offers.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "cgroup.subtree_control").write_text(controllers + "\n")
    return "24 23 0:22 / /sys rw - sysfs sysfs rw\n" + MOUNT.format(point=root)


def test_the_nearest_group_that_hands_out_both_is_the_home(tmp_path: Path) -> None:
    offers = {"": "cpu memory pids", "user": "cpu memory pids", "user/app": "memory", "user/app/own": ""}
    mounts = _tree(tmp_path, offers)
    assert find_parent_cgroup("0::/user/app/own\n", mounts) == str(tmp_path / "user")
    assert find_parent_cgroup("12:pids:/x\n0::/user\n", mounts) == str(tmp_path / "user")
    assert find_parent_cgroup("0::/elsewhere\n", mounts) == str(tmp_path)


@pytest.mark.parametrize(
    ("own", "offers", "said"),
    [
        ("4:memory:/x\n", {"": "memory pids"}, "no control groups of version 2"),
        ("0::/own\n", {"own": "", "": "memory"}, "no group above .*own delegates memory and pids"),
        ("0::/../other\n", {"": "memory pids"}, "is not below"),
    ],
)
def test_why_there_is_none_is_said(tmp_path: Path, own: str, offers: dict[str, str], said: str) -> None:
    with pytest.raises(CgroupError, match=said):
        find_parent_cgroup(own, _tree(tmp_path, offers))


def test_no_mount_is_no_group() -> None:
    with pytest.raises(CgroupError, match="no control groups of version 2"):
        find_parent_cgroup("0::/\n", "24 23 0:22 / /sys rw - sysfs sysfs rw\n")


def test_limits_are_those_of_all_processes_together(tmp_path: Path) -> None:
    names = ("memory.max", "pids.max", "cgroup.procs")
    group = Cgroup("job-1", {name: os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in names})
    group.join(SandboxLimits(processes=4, threads=10, memory_mb=100, disk_mb=50))
    assert {name: (tmp_path / name).read_text() for name in names} == {
        "memory.max": str((4 * 100 + 50 + 64) << 20),
        "pids.max": "16",
        "cgroup.procs": "0",
    }
    group.close()


def test_kills_for_memory_are_counted() -> None:
    assert count_oom_kills("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n") == 2
    assert count_oom_kills("low 0\noom_kill 0\n") == count_oom_kills("") == 0


@pytest.mark.skipif(bool(lacks("namespaces") and lacks("landlock")), reason="no backend works here")
def test_a_sandbox_says_whether_it_has_them() -> None:
    with Sandbox() as sandbox:
        why = sandbox.without_cgroups()
        own = Path(f"/proc/{sandbox.pid()}/cgroup").read_text()
        assert sandbox.run_sync("print(1)").stdout == "1\n"
    assert bool(why) != bool(re.search(r"rollmill-\d+/server", own))
