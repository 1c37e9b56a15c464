"""Honest programs that use much of the standard library run under the allow-list of system calls."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill_sandbox import Sandbox, SandboxLimits
from rollmill_sandbox.backend_selection import SAFE_BACKENDS

PATIENT = SandboxLimits(wall_s=120.0, cpu_s=60)  # time is not under test, and a busy machine is slow

ONE = {
    "sqlite3 in a file": """
import sqlite3
for mode in ("delete", "wal"):
    one, two = (sqlite3.connect("x.db") for _ in range(2))
    one.execute(f"pragma journal_mode={mode}")
    with one:
        one.execute("create table if not exists t (a)")
        one.executemany("insert into t values (?)", [(n,) for n in range(100)])
    print(two.execute("select sum(a) from t").fetchone()[0])
""",
    "asyncio": """
import asyncio, socket
async def main():
    left, right = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=left)
    other, answer = await asyncio.open_connection(sock=right)
    writer.write(b"x" * 100_000)
    writer.write_eof()
    got = await other.read()
    print(len(got), await asyncio.to_thread(sum, [1, 2]), await asyncio.wait_for(asyncio.sleep(.01, 5), 9))
asyncio.run(main())
""",
    "files": """
import glob, os, pathlib, shutil, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "a")
    path.write_text("x" * 100_000)
    shutil.copyfile(path, path.with_name("b"))
    os.replace(path.with_name("b"), path.with_name("c"))
    os.symlink("c", path.with_name("l"))
    os.link(path, path.with_name("h"))
    print(sorted(map(os.path.basename, glob.glob(folder + "/*"))), os.path.getsize(path.with_name("l")))
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.write(path, "a")
    print(shutil.disk_usage(".").total > 0, zipfile.ZipFile("z.zip").namelist())
    with open(path, "r+b") as file:
        file.truncate(5)
        os.fsync(file.fileno())
        os.posix_fallocate(file.fileno(), 0, 9)
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as other:
        file.write(b"x")
        other.write(b"y")
print(os.path.exists(folder))
""",
    "threads, locks and queues": """
import concurrent.futures, queue, threading
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(sum(pool.map(abs, range(-50, 50))))
done, event = queue.Queue(), threading.Event()
threading.Thread(target=lambda: (event.wait(), done.put(7))).start()
event.set()
print(done.get())
""",
    "signals and timers": """
import faulthandler, os, signal, threading, time
faulthandler.enable()
signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
signal.setitimer(signal.ITIMER_REAL, .01)
time.sleep(.05)
signal.signal(signal.SIGUSR1, lambda *_: print("usr1"))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
""",
    "select, pipes and mmap": """
import mmap, os, select, selectors, socket
reader, writer = os.pipe()
os.write(writer, b"x")
print(select.select([reader], [], [], 1)[0] == [reader])
poll = select.poll()
poll.register(reader)
print(bool(poll.poll(0)))
selector = selectors.DefaultSelector()
selector.register(reader, selectors.EVENT_READ)
print(len(selector.select(0)))
memory = mmap.mmap(-1, 1 << 20)
memory[:3] = b"abc"
memory.flush()
with open("f", "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
    mapped[0] = 1
    mapped.flush()
print(memory[:3], open("f", "rb").read(1))
left, right = socket.socketpair()
left.settimeout(1)
right.sendall(b"x")
print(left.recv(1), socket.socket(fileno=os.dup(left.fileno())).family.name)
""",
    "ctypes, hashing and compression": """
import bz2, ctypes, hashlib, lzma, os, platform, resource, secrets, zlib
compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
numbers = (ctypes.c_int * 3)(3, 1, 2)
ctypes.CDLL(None).qsort(numbers, 3, 4, compare(lambda a, b: a[0] - b[0]))
print(list(numbers), len(lzma.compress(bz2.compress(zlib.compress(bytes(99))))) > 0, len(secrets.token_bytes(9)))
print(platform.system(), os.cpu_count() > 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0, os.isatty(1))
print(hashlib.sha256(b"").hexdigest()[:4])
""",
}
MANY = {
    "subprocess": """
import asyncio, subprocess, sys
echo = [sys.executable, "-c", "print(input())"]
print(subprocess.run(echo, input="5", capture_output=True, text=True).stdout)
async def main():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(6)", stdout=-1)
    print((await child.communicate())[0])
asyncio.run(main())
""",
    "multiprocessing": """
import concurrent.futures, multiprocessing, os
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
    print(list(pool.map(abs, [-3])))
queue, lock = context.Queue(), context.Lock()
def put():
    with lock:
        queue.put(os.getpid() > 0)
child = context.Process(target=put)
child.start()
print(queue.get())
child.join()
one, other = context.Pipe()
one.send([1])
print(other.recv(), context.Value("i", 3).value)
if os.fork() == 0:
    os._exit(4)
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
}
CASES = [
    *((backend, 1, name) for backend in SAFE_BACKENDS for name in ONE),
    *(("namespaces", 8, name) for name in (*ONE, *MANY) if name != "sqlite3 in a file"),
]


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[dict[str, Sandbox]]:
    with Sandbox(backend="namespaces") as one, Sandbox(backend="landlock") as other, Sandbox(backend="plain") as plain:
        yield {"namespaces": one, "landlock": other, "plain": plain}


@pytest.mark.parametrize(("backend", "processes", "name"), CASES)
def test_a_program_does_what_it_does_without_a_sandbox(
    sandboxes: dict[str, Sandbox], backend: str, processes: int, name: str
) -> None:
    program, limits = (ONE | MANY)[name], SandboxLimits(processes=processes)
    expected = sandboxes["plain"].run_sync(program, limits=limits)
    assert expected.outcome == "ok", expected
    found = sandboxes[backend].run_sync(program, limits=limits)
    assert (found.outcome, found.stdout, found.stderr) == ("ok", expected.stdout, expected.stderr)


HUMAN_EVAL = Path(os.environ.get("ROLLMILL_DATA", "../shared/data"), "humaneval")


@pytest.mark.slow
@pytest.mark.parametrize("backend", SAFE_BACKENDS)
def test_the_canonical_solutions_of_humaneval_run(backend: str, sandboxes: dict[str, Sandbox]) -> None:
    files = sorted(HUMAN_EVAL.glob("*.jsonl*"))
    if not files:
        pytest.skip(f"no {HUMAN_EVAL}")
    read = gzip.open if files[0].suffix == ".gz" else open
    with read(files[0], "rt") as file:
        tasks = [json.loads(line) for line in file]
    assert len(tasks) == 164
    failed = []
    for task in tasks:
        program = f"{task['prompt']}{task['canonical_solution']}\n{task['test']}\ncheck({task['entry_point']})"
        result = sandboxes[backend].run_sync(program, limits=PATIENT)
        if result.outcome != "ok":
            failed.append((task["task_id"], result))
    assert failed == []
