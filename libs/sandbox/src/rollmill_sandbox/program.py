"""Runs a program in a confined process."""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import contextlib
import gc
import io
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from rollmill_sandbox.limits import OPEN_FILES, SandboxLimits

PROGRAM_NAME = "main.py"
MEMORY_ERROR = b"MemoryError\n"
_FOLDER = os.path.dirname(__file__)


def set_limits(limits: SandboxLimits, tasks: int | None, session: bool) -> None:
    """Set the kernel's limits on this process and its children.

    `tasks` is the maximum number of processes and threads of its user. In a session the supervisor enforces the CPU
    limit, per execution.
    """
    memory, disk, cpu = limits.memory_mb << 20, limits.disk_mb << 20, limits.cpu_s
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_SIGPENDING, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if not session:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    if tasks is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))


def run_program(text: str) -> NoReturn:
    """Run a program as `__main__`, like the interpreter, and end the process. Never returns."""
    status = 1
    try:
        status = _run(text)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the interpreter does
        atexit._run_exitfuncs()
    except MemoryError:
        status = 1
        os.write(2, MEMORY_ERROR)
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        flush_all()
        os._exit(status)


def _run(text: str) -> int:
    module = start_main(text)
    try:
        exec(compile(text, PROGRAM_NAME, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as exit_request:
        return _exit_status(exit_request.code)
    except MemoryError:
        module.__dict__.clear()
        gc.collect()
        os.write(2, MEMORY_ERROR)
        return 1
    except BaseException as error:
        print_traceback(error)
        return 1
    return 0


def flush_all() -> None:
    """Flush the streams, and files that the program left open in its names, like an interpreter at its end."""
    names = dict(getattr(sys.modules.get("__main__"), "__dict__", {}))
    for each in (sys.stdout, sys.stderr, *names.values(), sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):
            stream = getattr(each, "__self__", each)
            if isinstance(stream, io.IOBase) or each in (sys.stdout, sys.stderr):
                stream.flush()


def start_main(text: str) -> Any:
    """Create a module `__main__` for a program, and set up what the interpreter would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    sys.argv, sys.path[:0] = [PROGRAM_NAME], [os.getcwd()]
    add_lines(PROGRAM_NAME, text)
    module: Any = types.ModuleType("__main__")
    module.__dict__.update(__file__=PROGRAM_NAME, __builtins__=builtins)
    sys.modules["__main__"] = module
    return module


def open_streams() -> None:
    """Open Python's standard streams anew on their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        lines = 1 if old.line_buffering else -1
        new = open(number, old.mode, lines, old.encoding, old.errors, "\n", closefd=False)  # noqa: SIM115
        new.buffer.raw.name = f"<{name}>"
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def add_lines(name: str, text: str) -> None:
    """Let tracebacks show the lines of a text without a file."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def print_traceback(error: BaseException) -> None:
    """Print a traceback without the frames of the sandbox, at the start and at the end."""
    inner = error.__traceback__
    while inner is not None and _is_ours(inner):
        inner = inner.tb_next
    last = inner
    while last is not None and last.tb_next is not None and not _is_ours(last.tb_next):
        last = last.tb_next
    if last is not None:
        last.tb_next = None
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(error.with_traceback(inner))  # the interpreter's own hook would look for the file
    else:
        sys.excepthook(type(error), error.with_traceback(inner), inner)


def _is_ours(frame: types.TracebackType) -> bool:
    return os.path.dirname(frame.tb_frame.f_code.co_filename) == _FOLDER
