"""Runs hostile and harmless programs as an ordinary user, and says what was not as it has to be.

Started as root it becomes uid 65534 first, and opens the way to its interpreter in a mount namespace of its own. With
the argument "root" it then becomes the root of a user namespace that maps nobody else; with "none" such a root that may
open no namespace.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hostile import CPU, FILES, HOSTILE, KERNEL, NETWORK, PROCESSES, SMALL

from rollmill.sandbox import Sandbox, kernel
from rollmill.sandbox.root import NOBODY, map_user
from rollmill.sandbox.view import interpreter

QUICKEST = NETWORK + FILES + PROCESSES + KERNEL


def main() -> None:
    if os.getuid() == 0:
        _become_nobody()
    if sys.argv[1] in ("root", "none"):
        _become_root_of_a_namespace()
    if sys.argv[1] == "none":
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    wrong = []
    with Sandbox() as sandbox:
        for hostile in HOSTILE:
            if hostile.limits is CPU or (sys.argv[1] == "root" and hostile not in QUICKEST):
                continue
            found = sandbox.run_sync(hostile.program, limits=hostile.limits)
            if not hostile.contained(found):
                wrong.append(f"{hostile.name}: {found}")
        for program, expected in (("print(6 * 7)", "42\n"), ("import os; print(os.getuid())", "1000\n")):
            if (found := sandbox.run_sync(program, limits=SMALL)).stdout != expected:
                wrong.append(f"{program}: {found}")
    json.dump({"uid": os.getuid(), "wrong": wrong}, sys.stdout)


def _become_root_of_a_namespace() -> None:
    uid, gid, proc = os.getuid(), os.getgid(), os.open("/proc", os.O_PATH)
    kernel.unshare(kernel.CLONE_NEWUSER)
    map_user(proc, 0, 0, uid, gid)
    os.close(proc)


def _become_nobody() -> None:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    home = Path(interpreter()).parents[1]
    closed = [folder for folder in reversed(home.parents) if not folder.stat().st_mode & 0o1]
    if closed:
        opened = os.open(home, os.O_PATH)
        kernel.mount("tmpfs", str(closed[0]), "tmpfs", 0, "mode=755")
        home.mkdir(parents=True)
        kernel.mount(f"/proc/self/fd/{opened}", str(home), "none", kernel.MS_BIND | kernel.MS_REC)
        os.close(opened)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.set_dumpable(True)


if __name__ == "__main__":
    main()
