"""Hostile programs that try to escape, persist, or exhaust the machine. Each prints BREACH if it succeeds."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from rollmill_sandbox.backend import BackendName
from rollmill_sandbox.limits import ProgramResult, SandboxLimits
from rollmill_sandbox.syscalls import find_numbers
from rollmill_sandbox.watchdog import DISK_FULL

SMALL = SandboxLimits(wall_s=20.0, cpu_s=3, memory_mb=128, disk_mb=8, output_bytes=1 << 16)
QUICK = SandboxLimits(wall_s=0.4, cpu_s=3, memory_mb=128)
CPU = SandboxLimits(wall_s=20.0, cpu_s=1, memory_mb=128)
FORKS = SandboxLimits(wall_s=20.0, cpu_s=3, memory_mb=128, processes=8, threads=8)
TRY = """
import ctypes, errno, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):
    if libc.syscall(*map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "syscall")
def attempt():
%s
try:
    attempt()
    print("BREACH")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


_LANDLOCK_ERRORS = ("EACCES", "EPERM")
"""Errors of Landlock and its filter for paths that the other backend hides or mounts read-only."""


@dataclass(frozen=True)
class Attack:
    """A program and its expected result: one of `outcome`, after printing one of the errno names in `error`, if any."""

    name: str
    program: str
    outcome: str = "ok"
    error: str = ""
    limits: SandboxLimits = SMALL
    only: BackendName | None = None
    """The backend it targets; None for every backend that can run it."""

    def is_for(self, backend: BackendName) -> bool:
        """True if a backend can run it: the landlock backend never starts a second process."""
        return self.only in (None, backend) and (backend != "landlock" or self.limits.processes == 1)

    def is_contained(self, found: ProgramResult, backend: BackendName) -> bool:
        """True if a result is the expected one."""
        if "BREACH" in found.stdout:
            return False
        if backend == "landlock" and found.outcome == "error" and found.stderr.endswith(DISK_FULL.decode()):
            return True
        errors = (*self.error.split(), *(_LANDLOCK_ERRORS if backend == "landlock" else ()))
        as_expected = found.outcome != "ok" or not self.error or found.stdout.strip() in errors
        return found.outcome in self.outcome.split() and as_expected


def denied_attack(name: str, statements: str, error: str = "EPERM", only: BackendName | None = None) -> Attack:
    """Build an attack whose statements must fail with an OSError."""
    return Attack(name, TRY % "\n".join(f"    {line}" for line in statements.splitlines()), "ok", error, only=only)


def _call(name: str, *arguments: str) -> str:
    """Return a system call by its number on this machine."""
    return f"syscall({', '.join((str(find_numbers(name)[platform.machine() == 'aarch64']), *arguments))})"


_INT_80 = """
import ctypes, mmap, os
if os.uname().machine != "x86_64":
    os.abort()
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # getpid
print("BREACH", ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
_EXIT = 93 if platform.machine() == "aarch64" else 60
_HIDDEN = """\
import threading
held, failed = socket.socketpair(), []
def fill():
    try:
        for n in range(9):
            file = os.open(str(n), os.O_CREAT | os.O_RDWR)
            os.unlink(str(n))
            for _ in range(6): os.write(file, bytes(1 << 20))
            time.sleep(.03)
            %s
        time.sleep(.2)
    except OSError as error:
        failed.append(error)
    %s
%s
if failed: raise failed[0]"""
_HIDING = (
    ("messages", "EPERM", "socket.send_fds(held[0], [b'x'], [file]); os.close(file)", "", "fill()"),
    ("mappings", "ENOSPC", "libc.mmap(None, 4096, 1, 1, file, 0); os.close(file)", "", "fill()"),
    (
        "files of a process whose first thread has ended",
        "ENOSPC",
        "",
        "os.write(1, errno.errorcode[failed[0].errno].encode() if failed else b'BREACH')",
        f"threading.Thread(target=fill).start(); libc.syscall({_EXIT}, 0)",
    ),
)


NETWORK = [
    denied_attack(f"socket {family} {kind}", f"socket.socket(socket.{family}, socket.{kind})")
    for family, kind in (
        *(("AF_INET", "SOCK_STREAM"), ("AF_INET", "SOCK_DGRAM"), ("AF_INET6", "SOCK_STREAM")),
        *(
            ("AF_UNIX", "SOCK_STREAM"),
            ("AF_NETLINK", "SOCK_RAW"),
            ("AF_PACKET", "SOCK_RAW"),
            ("AF_VSOCK", "SOCK_STREAM"),
        ),
    )
] + [
    denied_attack("bind an abstract name", "a, b = socket.socketpair()\na.bind('\\0name')"),
    denied_attack("io_uring instead of sockets", _call("io_uring_setup", "8", "0")),
    denied_attack("a pair of datagram sockets", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"),
    denied_attack("a pair of packet sockets", "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)"),
    denied_attack("a message with an address", "socket.socketpair()[0].sendto(b'x', '/run/systemd/notify')"),
    denied_attack("a name server", "socket.create_connection(('127.0.0.1', 53), 1)"),
]
FILES = [
    denied_attack("read the users", "open('/etc/passwd')", "ENOENT"),
    denied_attack("read root's home", "os.listdir('/root/.ssh')", "ENOENT"),
    denied_attack("read /proc", "open('/proc/1/environ')", "ENOENT"),
    denied_attack("read /sys", "os.listdir('/sys')", "ENOENT"),
    denied_attack("read the disk", "open('/dev/vda', 'rb')", "ENOENT"),
    denied_attack("read the kernel's log", "open('/dev/kmsg', 'rb')", "ENOENT"),
    denied_attack("write the root", "open('/x', 'w')", "EROFS"),
    denied_attack("write beside Python", "open(os.__file__, 'a')", "EACCES EROFS"),
    denied_attack("chmod Python", "os.chmod(os.__file__, 0o777)", "EROFS"),
    denied_attack("utime Python", "os.utime(os.__file__)", "EROFS"),
    denied_attack("chmod a device", "os.chmod('/dev/null', 0o777)", "EROFS"),
    denied_attack("a symlink out", "os.symlink('/../../etc/passwd', 'x')\nopen('x')", "ENOENT"),
    denied_attack("climb out", "os.chdir('../../../../../../..')\nopen('etc/shadow')", "ENOENT"),
    denied_attack("chroot", "os.chroot('/tmp')"),
    denied_attack("a device node", "os.mknod('x', 0o666 | 0x2000, os.makedev(1, 1))"),
    denied_attack("open by handle", _call("open_by_handle_at", "3", "0", "0")),
    denied_attack("delete Python", "os.unlink(os.__file__)", "EROFS"),
    Attack(
        "delete everything",
        "import shutil, os\nshutil.rmtree('/', ignore_errors=True)\n"
        "print('BREACH' if not os.path.exists(os.__file__) else 'there')",
    ),
    denied_attack(
        "an inherited file",
        "for number in range(3, 5000):\n    try: os.fstat(number)\n    except OSError: pass\n"
        "    else: return\nos.fstat(3)",
        "EBADF",
    ),
    denied_attack("write the sealed stdin", "os.write(0, b'x')"),
]
PROCESSES = [
    denied_attack("fork", "if os.fork() == 0: os._exit(0)"),
    denied_attack("vfork", "import subprocess\nsubprocess.run([sys.executable, '-c', ''])"),
    denied_attack("a daemon", "if os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)"),
    denied_attack("ptrace", _call("ptrace", "16", "1", "0", "0")),
    denied_attack("read another's memory", _call("process_vm_readv", "1", "0", "0", "0", "0", "0")),
    denied_attack("another's limits", "import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (0, 0))"),
    denied_attack("a process descriptor", "os.pidfd_open(1)"),
    denied_attack("kill all by another name", "os.kill(1234567, 9)", "ESRCH"),
    denied_attack("clone with namespaces", _call("clone", "0x10000000 | 17", "0", "0", "0", "0")),
    denied_attack("clone3", _call("clone3", "0", "0"), "ENOSYS"),
    denied_attack("a thread with files of its own", _call("clone", "0x10900", "0", "0", "0", "0")),
    denied_attack("the same by close_range", "if libc.close_range(99, 99, 2): raise OSError(ctypes.get_errno(), '')"),
    denied_attack("a queued signal", _call("rt_sigqueueinfo", "os.getppid()", "0", "0")),
    denied_attack("a child of its parent", _call("clone", "0x8000 | 17", "0", "0", "0", "0")),
    denied_attack("a child that ends with another signal", _call("clone", "18", "0", "0", "0", "0")),
]
KERNEL = [
    denied_attack("a user namespace", _call("unshare", "0x10000000")),
    denied_attack("another's namespace", _call("setns", "0", "0")),
    denied_attack("mount", _call("mount", "0", "0", "0", "0", "0")),
    denied_attack("the new mount calls", _call("fsopen", "0", "0")),
    denied_attack("pivot_root", _call("pivot_root", "0", "0")),
    denied_attack("keyctl", _call("keyctl", "0", "0")),
    denied_attack("bpf", _call("bpf", "0", "0", "0")),
    denied_attack("perf_event_open", _call("perf_event_open", "0", "0", "0", "0", "0")),
    denied_attack("userfaultfd", _call("userfaultfd", "0")),
    denied_attack("memfd_create", "os.memfd_create('x')"),
    denied_attack("pages in a pipe", _call("vmsplice", "0", "0", "0", "0")),
    denied_attack("a pair of other sockets", "socket.socketpair(socket.AF_NETLINK, socket.SOCK_RAW)"),
    denied_attack("a signal that comes later", _call("timer_create", "0", "0", "0")),
    denied_attack("shared memory", _call("shmget", "0", "4096", "0o1666")),
    denied_attack("load a module", _call("init_module", "0", "0", "0")),
    denied_attack("kexec", _call("kexec_load", "0", "0", "0", "0")),
    denied_attack("reboot", _call("reboot", "0", "0", "0", "0")),
    denied_attack("set the clock", "time.clock_settime(time.CLOCK_REALTIME, 0)"),
    denied_attack("a call from the future", "syscall(700, 0)", "ENOSYS"),
    Attack("a call of 32 bits", _INT_80, "killed"),
    denied_attack("a call of x32", "syscall(0x40000000 + 41, 2, 1, 0)", "ENOSYS"),
    denied_attack("become root", "os.setuid(0)", "EINVAL"),
    denied_attack(
        "hide from the supervisor's end", "if libc.prctl(1, 0, 0, 0, 0): raise OSError(1, '')", only="landlock"
    ),
    denied_attack("another's priority", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)", only="landlock"),
    denied_attack("another's processors", "os.sched_setaffinity(os.getppid(), [0])", only="landlock"),
    denied_attack("a signal to the supervisor", "os.kill(os.getppid(), 0)", only="landlock"),
    denied_attack("a signal to its group", "os.killpg(0, 0)", only="landlock"),
    denied_attack("chmod its own file", "open('x', 'w').close()\nos.chmod('x', 0o777)", only="landlock"),
    denied_attack(
        "a signal through a file",
        "import fcntl\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    ),
    denied_attack("another signal through a file", "import fcntl\nfcntl.fcntl(os.pipe()[0], 10, signal.SIGCONT)"),
    denied_attack("run a program", "os.execv(sys.executable, ['python'])", only="landlock"),
    denied_attack("watch files", "if libc.inotify_init() < 0: raise OSError(ctypes.get_errno(), '')", only="landlock"),
    denied_attack("link a file of the machine", "os.link(os.__file__, 'x')\nopen('x', 'a')", "EROFS EXDEV EACCES"),
    denied_attack("read another's folder", "os.listdir('..')", "EACCES", only="landlock"),
    denied_attack(
        "raise a limit",
        "libc.setrlimit(9, (ctypes.c_ulong * 2)(1 << 62, 1 << 62)) and " + _call("prlimit64", "1", "0", "0", "0"),
    ),
]
KERNEL_MEMORY = [
    denied_attack(
        "a large send buffer", "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)"
    ),
    denied_attack(
        "a large receive buffer", "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)"
    ),
    denied_attack("a large pipe", "import fcntl\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20)"),
    denied_attack("a lock of a file of the machine", "import fcntl\nfcntl.flock(open(os.__file__), fcntl.LOCK_SH)"),
    denied_attack("a lease of a file", "import fcntl\nfcntl.fcntl(open('x', 'w'), fcntl.F_SETLEASE, fcntl.F_RDLCK)"),
    denied_attack("notices of a folder", "import fcntl\nfcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, 1)"),
    denied_attack("an open file's lock", "import fcntl\nfcntl.fcntl(open('x', 'w'), 37, bytes(32))"),
    denied_attack("watches of files", "if libc.inotify_init() < 0: raise OSError(ctypes.get_errno(), '')"),
    denied_attack("rules of Landlock", _call("landlock_create_ruleset", "0", "0", "1")),
    denied_attack("filters on the filter", _call("seccomp", "1", "0", "0")),
    denied_attack("attributes of files", "open('x', 'w').close()\nos.setxattr('x', 'user.a', bytes(999))"),
    denied_attack(
        "pages of files in sockets", "os.sendfile(socket.socketpair()[0].fileno(), open(os.__file__).fileno(), 0, 9)"
    ),
    denied_attack("pages of files in pipes", "os.splice(open(os.__file__).fileno(), os.pipe()[1], 9)"),
    denied_attack("huge pages", "import mmap\nmmap.mmap(-1, 1 << 21, flags=0x40022)"),
    denied_attack("queues of messages", _call("mq_open", "0", "0", "0", "0")),
    denied_attack("queues for disks", _call("io_setup", "9", "0")),
    denied_attack("flush the machine's disks", _call("sync")),
]
BOMBS = [
    Attack("memory", "x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
    Attack("memory at once", "x = bytearray(1 << 40)", "memory"),
    Attack(
        "memory caught and tried again",
        "while True:\n try: x = [bytearray(1 << 24) for _ in range(99)]\n except MemoryError: pass",
        "timeout",
        limits=CPU,
    ),
    Attack(
        "threads",
        "import threading, time\nfor _ in range(5000):\n"
        " threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint('BREACH')",
        "error",
    ),
    Attack("forks", "import os\nwhile True: os.fork()", "error", limits=FORKS),
    Attack(
        "forks that go on",
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        "timeout",
        limits=SandboxLimits(wall_s=0.4, processes=16),
    ),
    denied_attack("disk in one file", "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))", "EFBIG"),
    denied_attack(
        "disk in many files", "for n in range(99999):\n    open(str(n), 'wb').write(bytes(1 << 20))", "ENOSPC"
    ),
    denied_attack(
        "disk in files without a name",
        "x = []\nfor n in range(200):\n    x.append(open(str(n), 'wb'))\n    os.unlink(str(n))\n"
        "    x[-1].write(bytes(1 << 20))\n    x[-1].flush()\n    time.sleep(.02)\ntime.sleep(.2)",  # before EMFILE
        "ENOSPC",
    ),
    *(denied_attack(f"disk in {name}", _HIDDEN % tuple(hiding), error) for name, error, *hiding in _HIDING),
    Attack(
        "empty files",
        TRY % "    for n in range(99999):\n        open(str(n), 'wb').close()",
        "ok timeout",
        "ENOSPC",
        SandboxLimits(wall_s=20.0, cpu_s=1, memory_mb=128, disk_mb=8),
    ),
    denied_attack("a sparse file", "open('x', 'wb').truncate(1 << 40)", "EFBIG"),
    denied_attack("descriptors", "x = [os.dup(0) for _ in range(5000)]", "EMFILE"),
    Attack("stdout", "while True: print('x' * 4096)", "output"),
    Attack("stderr", "import os\nwhile True: os.write(2, b'x' * 4096)", "output"),
    Attack("sleep", "import time\ntime.sleep(1e6)", "timeout", limits=QUICK),
    Attack("busy", "while True: pass", "timeout", limits=CPU),
    Attack(
        "busy without a signal",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
        limits=CPU,
    ),
    Attack(
        "deaf",
        "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\ntime.sleep(1e6)",
        "timeout",
        limits=QUICK,
    ),
    Attack("a power tower", "print(9 ** 9 ** 9)", "timeout", limits=QUICK),
    Attack(
        "deep recursion",
        "import sys\nsys.setrecursionlimit(1 << 30)\nf = lambda: f()\nf()",
        "killed error memory",
        limits=SandboxLimits(wall_s=60.0, cpu_s=30, memory_mb=48),
    ),
    Attack("segmentation fault", "import ctypes\nctypes.string_at(0)", "killed"),
    Attack("abort", "import os\nos.abort()", "killed"),
    Attack("kill all", "import os\ntry: os.kill(-1, 9)\nexcept OSError: os.kill(os.getpid(), 9)", "killed"),
    Attack("kill process 1", "import os, time\nfor n in (2, 9, 15, 19): \n try: os.kill(1, n)\n except OSError: pass"),
    Attack("kill the supervisor", "import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass"),
    Attack(
        "a deep tree",
        "import os\nfor n in range(200):\n os.mkdir('x' * 50)\n os.chdir('x' * 50)\nopen('y', 'w').write('z')",
        "ok error",
    ),
    Attack(
        "a closed folder", "import os\nos.mkdir('a', 0o300)\nopen('a/b', 'w').write('c')\nos.mkdir('d', 0)", "ok error"
    ),
    Attack("exit before output", "import os\nprint('lost')\nos._exit(0)"),
    Attack("a wrong status", "import os\nos._exit(7)", "error"),
    Attack("null bytes", "print('\0')", "error"),
    Attack("not even Python", "\ud800 (((", "error"),
    Attack("nested brackets", "x = " + "(" * 10_000, "error"),
    Attack(
        "a tracer of the runner",
        "import sys\nfor n in range(9):\n"
        " try: f = sys._getframe(n)\n except ValueError: break\n f.f_globals.clear()\nprint('on')",
        "error",
    ),
    Attack("closed streams", "import os\nfor n in range(3): os.close(n)"),
]
ATTACKS = NETWORK + FILES + PROCESSES + KERNEL + KERNEL_MEMORY + BOMBS
