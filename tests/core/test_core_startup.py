"""Imports without the garbage collector, which is there again afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from rollmill.startup import quick_imports


def test_the_collector_is_paused_and_comes_back() -> None:
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_leaves_the_collector_on_while_it_works_and_at_its_end_calls_what_has_to_be_called() -> None:
    text = (
        "import atexit, gc, rollmill, rollmill.cli; atexit.register(lambda: print('end', flush=True));"
        "assert rollmill.Task is not None and gc.isenabled(); rollmill.cli.main(['algorithms']); print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["True", "end"]
