"""Features of this kernel that the sandbox needs."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from rollmill_sandbox.landlock import landlock_version
from rollmill_sandbox.landlock_backend import LEAST_VERSION

_NEW_USER_AND_MOUNT = 0x10000000 | 0x00020000
_UNSHARE = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({_NEW_USER_AND_MOUNT}) != 0)"


@cache
def lacks(backend: str) -> str:
    """Name the reason why a backend cannot work here; empty if it can."""
    if backend == "landlock":
        return "" if landlock_version() >= LEAST_VERSION else f"this kernel has no Landlock of version {LEAST_VERSION}"
    refused = subprocess.run([sys.executable, "-c", _UNSHARE]).returncode
    return "the kernel allows no user namespaces here" if refused else ""
