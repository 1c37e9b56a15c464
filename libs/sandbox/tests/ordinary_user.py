"""Runs hostile and harmless programs as an ordinary user, and says what was not as it has to be.

Started as root it becomes uid 65534 first, and opens the way to its interpreter in a mount namespace of its own. With
the argument "root" it then becomes the root of a user namespace that maps nobody else; with "none" such a root that may
open no namespace, so that the landlock backend is what is left; with "landlock" it asks for that itself; with "refused"
it asks for namespaces where it may open none. The second argument "all" adds the programs that use up the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from rollmill_sandbox import Sandbox, kernel
from rollmill_sandbox.attacks import ATTACKS, FILES, KERNEL, NETWORK, PROCESSES, SMALL
from rollmill_sandbox.backend_selection import BackendChoice
from rollmill_sandbox.isolation_check import run_attacks
from rollmill_sandbox.root_filesystem import NOBODY, map_user
from rollmill_sandbox.visible_files import find_interpreter

QUICKEST = NETWORK + FILES + PROCESSES + KERNEL


def main() -> None:
    if os.getuid() == 0:
        _become_nobody()
    kind = sys.argv[1]
    if kind in ("root", "none", "refused"):
        _become_root_of_a_namespace()
    if kind in ("none", "refused"):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    wrong = []
    asked: BackendChoice = "landlock" if kind == "landlock" else "namespaces" if kind == "refused" else "auto"
    with Sandbox(backend=asked, jobs=8) as sandbox:
        backend = sandbox.chosen()
        programs = [each for each in ATTACKS if "timeout" not in each.outcome] if "all" in sys.argv else QUICKEST
        for hostile, found in asyncio.run(run_attacks(sandbox, programs)):
            if not hostile.is_contained(found, backend):
                wrong.append(f"{hostile.name}: {found}")
        uid = "1000\n" if backend == "namespaces" else f"{os.getuid()}\n"
        for program, expected in (("print(6 * 7)", "42\n"), ("import os; print(os.getuid())", uid)):
            if (found := sandbox.run_sync(program, limits=SMALL)).stdout != expected:
                wrong.append(f"{program}: {found}")
    json.dump({"uid": os.getuid(), "backend": backend, "enough": len(programs) >= 60, "wrong": wrong}, sys.stdout)


def _become_root_of_a_namespace() -> None:
    uid, gid, proc = os.getuid(), os.getgid(), os.open("/proc", os.O_PATH)
    kernel.unshare(kernel.CLONE_NEWUSER)
    map_user(proc, 0, 0, uid, gid)
    os.close(proc)


def _become_nobody() -> None:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    home = Path(find_interpreter()).parents[1]
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
