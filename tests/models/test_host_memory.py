"""What glibc does with freed memory, in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource
from rollmill.models.cpu.host_memory import keep_freed_blocks, return_large_blocks, trim_heap

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(64 << 20)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = [pages(), pages()]
keep_freed_blocks()
found += [pages(), pages()]
trim_heap()
found += [pages(), pages()]
return_large_blocks()
found += [pages(), pages()]
print(json.dumps([each > 8000 for each in found]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such options")
@pytest.mark.parametrize(
    ("variables", "fresh"),
    [
        ({}, [True, True, True, False, True, False, True, True]),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, [True] * 8),
    ],
    ids=["chosen", "left to the environment"],
)
def test_freed_memory_is_kept_or_returned(variables: dict[str, str], fresh: list[bool]) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=own | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == fresh
