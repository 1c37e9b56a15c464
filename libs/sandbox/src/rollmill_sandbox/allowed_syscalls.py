"""The system calls that a program may make, with the reason for each. Every other call is refused.

A call is in the table because Python, the C library, or the common libraries need it, and because what it can reach is
limited in another way: by the file system view, by Landlock, or by a resource limit. Calls that can make the kernel
hold memory which no limit counts are not in it, or only with arguments that cannot (`kernel_memory_mb` has the sum).

Columns: x86_64 (arch/x86/entry/syscalls/syscall_64.tbl), aarch64 (include/uapi/asm-generic/unistd.h); -1 if the
architecture has no such call.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal

FilterKind = Literal["one", "many", "alone"]
"""Programs of one process in namespaces; of several processes in namespaces; of one process without namespaces."""
_EVERY: tuple[FilterKind, ...] = ("one", "many", "alone")
_JAILED: tuple[FilterKind, ...] = ("one", "many")
_MANY: tuple[FilterKind, ...] = ("many",)
_SINGLE: tuple[FilterKind, ...] = ("one", "alone")
_ALONE: tuple[FilterKind, ...] = ("alone",)
EVERY_BIT = 0xFFFFFFFF
OWN_PID = 0x7FFFFFFE
"""Stands for the program's process id in a test; above every process id."""


@dataclass(frozen=True, slots=True)
class ArgumentTest:
    """A condition on the lower half of an argument, or on its upper half: the bits of `mask` have one of `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = EVERY_BIT
    upper: bool = False

    def holds(self, arguments: tuple[int, ...], own_pid: int) -> bool:
        """True if the arguments of a call, of 64 bits each, fulfil it."""
        word = arguments[self.argument] >> (32 if self.upper else 0) & EVERY_BIT
        return word & self.mask in (own_pid if value == OWN_PID else value for value in self.values)


@dataclass(frozen=True, slots=True)
class AllowedCall:
    """A system call that programs of some kinds may make, if its arguments pass every test."""

    name: str
    x86_64: int
    aarch64: int
    reason: str
    kinds: tuple[FilterKind, ...] = _EVERY
    tests: tuple[ArgumentTest, ...] = ()
    refusal: int = errno.EPERM
    """The error of a call whose arguments fail a test."""
    answered: tuple[tuple[ArgumentTest, int], ...] = ()
    """Calls that are not made: those that pass the test get this error, or success for 0."""
    asked: tuple[tuple[ArgumentTest, int], ...] = ()
    """Calls that the program's supervisor admits (`file_locks`); this error where the kernel cannot ask it."""

    def number(self, machine: str) -> int:
        """Return its number on "x86_64" or "aarch64", -1 if there is none."""
        return self.x86_64 if machine == "x86_64" else self.aarch64


def _one_of(argument: int, *values: int, mask: int = EVERY_BIT) -> ArgumentTest:
    return ArgumentTest(argument, values, mask)


def _without(argument: int, bits: int) -> ArgumentTest:
    return ArgumentTest(argument, (0,), bits)


_THREAD, _FILES = 0x00010000, 0x00000400
_CLONE_REFUSED = 0xFE82B000  # new namespaces, PIDFD, PTRACE, PARENT, UNTRACED, IO
_CLONE = (_without(0, _CLONE_REFUSED), _one_of(0, 0, 17, mask=0xFF))  # SIGCHLD, or no signal at its end
_NOTHING_OR_FILES = _one_of(0, 0, _FILES, _THREAD | _FILES, mask=_THREAD | _FILES)
_MAP_REFUSED = 0x42100  # HUGETLB takes the machine's reserve; LOCKED, GROWSDOWN
_ADVICE = (*range(5), 8, 10, 11, *range(14, 20), 20, 22, 23, 102, 103)  # not MERGEABLE, REMOVE, PAGEOUT, HWPOISON
_PRCTL = (3, 15, 16, 23)  # GET_DUMPABLE, SET_NAME, GET_NAME, CAPBSET_READ
_FCNTL = (*range(6), 1030, 1032, 1034)  # DUPFD, GET/SETFD, GET/SETFL, GETLK, DUPFD_CLOEXEC, GETPIPE_SZ, GET_SEALS
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
# TCGETS, TCGETS2, TIOCGWINSZ, TIOCGPGRP, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE
_SOCKET_OPTIONS = (3, 4, 7, 8, 17, 30, 38, 39)  # TYPE, ERROR, SNDBUF, RCVBUF, PEERCRED, ACCEPTCONN, PROTOCOL, DOMAIN
_NO_ADDRESS = (ArgumentTest(4, (0,)), ArgumentTest(4, (0,), upper=True))
_SET_LOCK = _one_of(1, 6, 7)  # F_SETLK, F_SETLKW

_FILES_TABLE = (
    AllowedCall("read", 0, 63, "reads files, pipes and sockets"),
    AllowedCall("write", 1, 64, "writes files, pipes and sockets; the size of files is limited"),
    AllowedCall("readv", 19, 65, "os.readv"),
    AllowedCall("writev", 20, 66, "os.writev, and messages of the C library"),
    AllowedCall("pread64", 17, 67, "sqlite3, os.pread, the dynamic loader"),
    AllowedCall("pwrite64", 18, 68, "sqlite3, os.pwrite"),
    AllowedCall("preadv", 295, 69, "os.preadv"),
    AllowedCall("pwritev", 296, 70, "os.pwritev"),
    AllowedCall("preadv2", 327, 286, "os.preadv with flags"),
    AllowedCall("pwritev2", 328, 287, "os.pwritev with flags"),
    AllowedCall("open", 2, -1, "opens files; the file system view decides which"),
    AllowedCall("openat", 257, 56, "opens files; the file system view decides which"),
    AllowedCall("creat", 85, -1, "older programs"),
    AllowedCall("close", 3, 57, "closes files"),
    AllowedCall("close_range", 436, 436, "os.closerange, subprocess", tests=(_without(2, 2),)),  # 2: UNSHARE
    AllowedCall("lseek", 8, 62, "positions in files"),
    AllowedCall("stat", 4, -1, "os.stat"),
    AllowedCall("fstat", 5, 80, "os.fstat, open"),
    AllowedCall("lstat", 6, -1, "os.lstat"),
    AllowedCall("newfstatat", 262, 79, "os.stat, imports"),
    AllowedCall("statx", 332, 291, "os.stat of some C libraries"),
    AllowedCall("access", 21, -1, "os.access, the dynamic loader"),
    AllowedCall("faccessat", 269, 48, "os.access"),
    AllowedCall("faccessat2", 439, 439, "os.access with flags"),
    AllowedCall("getdents", 78, -1, "os.listdir of older programs"),
    AllowedCall("getdents64", 217, 61, "os.listdir, imports"),
    AllowedCall("getcwd", 79, 17, "os.getcwd"),
    AllowedCall("chdir", 80, 49, "os.chdir"),
    AllowedCall("fchdir", 81, 50, "os.fchdir"),
    AllowedCall("readlink", 89, -1, "os.readlink, realpath"),
    AllowedCall("readlinkat", 267, 78, "os.readlink, realpath"),
    AllowedCall("mkdir", 83, -1, "os.mkdir"),
    AllowedCall("mkdirat", 258, 34, "os.mkdir, tempfile"),
    AllowedCall("rmdir", 84, -1, "os.rmdir"),
    AllowedCall("rename", 82, -1, "os.rename"),
    AllowedCall("renameat", 264, 38, "os.rename"),
    AllowedCall("renameat2", 316, 276, "os.rename of some C libraries"),
    AllowedCall("link", 86, -1, "os.link"),
    AllowedCall("linkat", 265, 37, "os.link"),
    AllowedCall("symlink", 88, -1, "os.symlink"),
    AllowedCall("symlinkat", 266, 36, "os.symlink"),
    AllowedCall("unlink", 87, -1, "os.unlink"),
    AllowedCall("unlinkat", 263, 35, "os.unlink, os.rmdir, shutil.rmtree"),
    AllowedCall("truncate", 76, 45, "os.truncate; the size of files is limited"),
    AllowedCall("ftruncate", 77, 46, "file.truncate, sqlite3; the size of files is limited"),
    AllowedCall("fallocate", 285, 47, "os.posix_fallocate; the size of files is limited"),
    AllowedCall("fadvise64", 221, 223, "os.posix_fadvise"),
    AllowedCall("copy_file_range", 326, 285, "os.copy_file_range; not sendfile, which keeps pages in sockets"),
    AllowedCall("fsync", 74, 82, "os.fsync, sqlite3; not sync and syncfs, which flush the machine's disks"),
    AllowedCall("fdatasync", 75, 83, "os.fdatasync, sqlite3"),
    AllowedCall("msync", 26, 227, "mmap.flush"),
    AllowedCall("umask", 95, 166, "os.umask, tempfile"),
    AllowedCall("statfs", 137, 43, "shutil.disk_usage"),
    AllowedCall("fstatfs", 138, 44, "shutil.disk_usage"),
    AllowedCall("getxattr", 191, 8, "shutil.copy2 reads attributes; setting them is refused, they take memory"),
    AllowedCall("lgetxattr", 192, 9, "shutil.copy2"),
    AllowedCall("fgetxattr", 193, 10, "shutil.copy2"),
    AllowedCall("listxattr", 194, 11, "shutil.copy2"),
    AllowedCall("llistxattr", 195, 12, "shutil.copy2"),
    AllowedCall("flistxattr", 196, 13, "shutil.copy2"),
    AllowedCall("dup", 32, 23, "os.dup"),
    AllowedCall("dup2", 33, -1, "os.dup2, subprocess"),
    AllowedCall("dup3", 292, 24, "os.dup2, subprocess"),
    AllowedCall(
        "fcntl",
        72,
        25,
        "flags and copies of descriptors, sqlite3; not owners, signals and leases, nor the size of a pipe. A lock of a "
        "file always succeeds and is not made: it would take memory without a limit, and could keep others out of a "
        "file of the machine. A process never conflicts with itself, so that this is exact",
        _SINGLE,
        (_one_of(1, *_FCNTL),),
        answered=((_SET_LOCK, 0),),
    ),
    AllowedCall(
        "fcntl",
        72,
        25,
        "as for one process, but a lock keeps other processes out: it is made while the program has few",
        _MANY,
        (_one_of(1, *_FCNTL),),
        asked=((_SET_LOCK, errno.ENOLCK),),
    ),
    AllowedCall(
        "ioctl",
        16,
        29,
        "isatty, size of a terminal, bytes to read, blocking, inheritance, copies of files (pathlib)",
        tests=(_one_of(1, *_IOCTL),),
        refusal=errno.ENOTTY,
    ),
    AllowedCall("chmod", 90, -1, "os.chmod; not covered by Landlock, so in a separate root only", _JAILED),
    AllowedCall("fchmod", 91, 52, "os.chmod, tempfile, shutil.copy", _JAILED),
    AllowedCall("fchmodat", 268, 53, "os.chmod", _JAILED),
    AllowedCall("chown", 92, -1, "os.chown, to its own ids", _JAILED),
    AllowedCall("fchown", 93, 55, "os.chown, to its own ids", _JAILED),
    AllowedCall("lchown", 94, -1, "os.chown, to its own ids", _JAILED),
    AllowedCall("fchownat", 260, 54, "os.chown, to its own ids", _JAILED),
    AllowedCall("utime", 132, -1, "os.utime", _JAILED),
    AllowedCall("utimes", 235, -1, "os.utime", _JAILED),
    AllowedCall("futimesat", 261, -1, "os.utime", _JAILED),
    AllowedCall("utimensat", 280, 88, "os.utime, shutil.copy2", _JAILED),
)

_MEMORY_TABLE = (
    AllowedCall("brk", 12, 214, "the C library's heap; address space is limited"),
    AllowedCall("mmap", 9, 222, "memory and files; address space is limited", tests=(_without(3, _MAP_REFUSED),)),
    AllowedCall("munmap", 11, 215, "memory"),
    AllowedCall("mremap", 25, 216, "realloc; address space is limited"),
    AllowedCall("mprotect", 10, 226, "the dynamic loader, stacks of threads, ctypes"),
    AllowedCall(
        "madvise",
        28,
        233,
        "the C library, numpy; no advice that acts on other memory",
        tests=(_one_of(2, *_ADVICE),),
        refusal=errno.EINVAL,
    ),
    AllowedCall("membarrier", 324, 283, "C libraries with threads"),
    AllowedCall("pkey_mprotect", 329, 288, "the dynamic loader of some systems"),
)
_PROCESS_TABLE = (
    AllowedCall("exit", 60, 93, "the end of a thread"),
    AllowedCall("exit_group", 231, 94, "the end of a process"),
    AllowedCall("getpid", 39, 172, "os.getpid"),
    AllowedCall("getppid", 110, 173, "os.getppid"),
    AllowedCall("gettid", 186, 178, "threading"),
    AllowedCall("getuid", 102, 174, "os.getuid, site"),
    AllowedCall("geteuid", 107, 175, "os.geteuid"),
    AllowedCall("getgid", 104, 176, "os.getgid"),
    AllowedCall("getegid", 108, 177, "os.getegid"),
    AllowedCall("getresuid", 118, 148, "os.getresuid"),
    AllowedCall("getresgid", 120, 150, "os.getresgid"),
    AllowedCall("getgroups", 115, 158, "os.getgroups"),
    AllowedCall("getpgrp", 111, -1, "os.getpgrp"),
    AllowedCall("getpgid", 121, 155, "os.getpgid"),
    AllowedCall("getsid", 124, 156, "os.getsid"),
    AllowedCall("setsid", 112, 157, "os.setsid, subprocess"),
    AllowedCall("setpgid", 109, 154, "os.setpgid, subprocess; within its own session"),
    AllowedCall("setuid", 105, 146, "daemons; its user namespace maps one id", _JAILED),
    AllowedCall("setgid", 106, 144, "daemons; its user namespace maps one id", _JAILED),
    AllowedCall("setreuid", 113, 145, "daemons; its user namespace maps one id", _JAILED),
    AllowedCall("setregid", 114, 143, "daemons; its user namespace maps one id", _JAILED),
    AllowedCall("setresuid", 117, 147, "daemons; its user namespace maps one id", _JAILED),
    AllowedCall("setresgid", 119, 149, "daemons; its user namespace maps one id", _JAILED),
    AllowedCall("setgroups", 116, 159, "daemons; its user namespace refuses it", _JAILED),
    AllowedCall("capget", 125, 90, "C libraries; it has no capability"),
    AllowedCall("getrlimit", 97, 163, "resource.getrlimit"),
    AllowedCall("setrlimit", 160, 164, "resource.setrlimit; only downwards"),
    AllowedCall("prlimit64", 302, 261, "the same of newer C libraries; of itself only", tests=(_one_of(0, 0),)),
    AllowedCall("getrusage", 98, 165, "resource.getrusage"),
    AllowedCall("times", 100, 153, "os.times"),
    AllowedCall("uname", 63, 160, "platform, os.uname"),
    AllowedCall("sysinfo", 99, 179, "qsort of some C libraries, os.sysconf"),
    AllowedCall("getpriority", 140, 141, "os.getpriority"),
    AllowedCall("setpriority", 141, 140, "os.nice; of itself only", tests=(_one_of(0, 0), _one_of(1, 0))),
    AllowedCall("sched_yield", 24, 124, "time.sleep(0), threads"),
    AllowedCall("sched_getaffinity", 204, 123, "os.cpu_count, OpenMP"),
    AllowedCall("sched_getparam", 143, 121, "the C library's threads"),
    AllowedCall("sched_getscheduler", 145, 120, "the C library's threads"),
    AllowedCall("sched_get_priority_max", 146, 125, "os.sched_get_priority_max"),
    AllowedCall("sched_get_priority_min", 147, 126, "os.sched_get_priority_min"),
    AllowedCall("sched_setaffinity", 203, 122, "OpenMP; of itself only", tests=(_one_of(0, 0),)),
    AllowedCall("getcpu", 309, 168, "sched_getcpu, memory allocators"),
    AllowedCall("prctl", 157, 167, "names of threads", _SINGLE, (_one_of(0, *_PRCTL),)),
    AllowedCall("prctl", 157, 167, "names of threads, signal at a parent's end (1)", _MANY, (_one_of(0, 1, *_PRCTL),)),
    AllowedCall(
        "arch_prctl", 158, -1, "thread-local memory after exec", _JAILED, (_one_of(0, 0x1002, 0x1003),), errno.EINVAL
    ),
    AllowedCall(
        "clone",
        56,
        220,
        "threads, which share their open files",
        _SINGLE,
        (*_CLONE, _one_of(0, _THREAD | _FILES, mask=_THREAD | _FILES)),
    ),
    AllowedCall("clone", 56, 220, "threads and processes, without namespaces", _MANY, (*_CLONE, _NOTHING_OR_FILES)),
    AllowedCall("fork", 57, -1, "os.fork of some C libraries", _MANY),
    AllowedCall("vfork", 58, -1, "subprocess of some C libraries", _MANY),
    AllowedCall("execve", 59, 221, "os.execv, subprocess; the filter stays", _JAILED),
    AllowedCall("wait4", 61, 260, "os.wait, subprocess"),
    AllowedCall("waitid", 247, 95, "os.waitid"),
    AllowedCall("set_tid_address", 218, 96, "the start of a process"),
    AllowedCall("set_robust_list", 273, 99, "the start of a thread"),
    AllowedCall("rseq", 334, 293, "the start of a thread"),
    AllowedCall("getrandom", 318, 278, "os.urandom, random, hash seeds"),
)
_SIGNAL_AND_TIME_TABLE = (
    AllowedCall("rt_sigaction", 13, 134, "signal.signal"),
    AllowedCall("rt_sigprocmask", 14, 135, "signal.pthread_sigmask, threads"),
    AllowedCall("rt_sigreturn", 15, 139, "the end of a signal handler"),
    AllowedCall("rt_sigpending", 127, 136, "signal.sigpending"),
    AllowedCall("rt_sigsuspend", 130, 133, "signal.pause, sigsuspend"),
    AllowedCall("rt_sigtimedwait", 128, 137, "signal.sigwait"),
    AllowedCall("sigaltstack", 131, 132, "faulthandler"),
    AllowedCall("restart_syscall", 219, 128, "the kernel restarts a sleep after a stop"),
    AllowedCall("pause", 34, -1, "signal.pause"),
    AllowedCall("kill", 62, 129, "os.kill; its process namespace has no other process", _JAILED),
    AllowedCall("tkill", 200, 130, "older C libraries", _JAILED),
    AllowedCall("tgkill", 234, 131, "abort, signal.pthread_kill", _JAILED),
    AllowedCall("kill", 62, 129, "os.kill; itself only", _ALONE, (_one_of(0, OWN_PID),)),
    AllowedCall("tgkill", 234, 131, "abort, signal.pthread_kill; itself only", _ALONE, (_one_of(0, OWN_PID),)),
    AllowedCall("alarm", 37, -1, "signal.alarm"),
    AllowedCall("getitimer", 36, 102, "signal.getitimer"),
    AllowedCall("setitimer", 38, 103, "signal.setitimer; one timer of each kind"),
    AllowedCall("nanosleep", 35, 101, "time.sleep of some C libraries"),
    AllowedCall("clock_nanosleep", 230, 115, "time.sleep"),
    AllowedCall("clock_gettime", 228, 113, "time.time, time.monotonic"),
    AllowedCall("clock_getres", 229, 114, "time.get_clock_info"),
    AllowedCall("gettimeofday", 96, 169, "older programs"),
    AllowedCall("time", 201, -1, "older programs"),
    AllowedCall("futex", 202, 98, "locks and conditions of threads, multiprocessing"),
    AllowedCall("futex_waitv", 449, 449, "locks of some runtimes"),
)
_WAITING_TABLE = (
    AllowedCall("pipe", 22, -1, "os.pipe; 64 KiB each"),
    AllowedCall("pipe2", 293, 59, "os.pipe, subprocess; 64 KiB each, since F_SETPIPE_SZ is refused"),
    AllowedCall("poll", 7, -1, "selectors, subprocess"),
    AllowedCall("ppoll", 271, 73, "selectors, subprocess"),
    AllowedCall("select", 23, -1, "select.select, time.sleep"),
    AllowedCall("pselect6", 270, 72, "select.select"),
    AllowedCall("epoll_create", 213, -1, "asyncio; several processes could hold too many items, and use poll", _SINGLE),
    AllowedCall("epoll_create1", 291, 20, "asyncio; several processes could hold too many items", _SINGLE),
    AllowedCall("epoll_ctl", 233, 21, "asyncio", _SINGLE),
    AllowedCall("epoll_wait", 232, -1, "asyncio", _SINGLE),
    AllowedCall("epoll_pwait", 281, 22, "asyncio", _SINGLE),
    AllowedCall("epoll_pwait2", 441, 441, "asyncio", _SINGLE),
    AllowedCall("eventfd2", 290, 19, "os.eventfd"),
    AllowedCall("timerfd_create", 283, 85, "os.timerfd_create; without signals, one timer each"),
    AllowedCall("timerfd_settime", 286, 86, "os.timerfd_settime"),
    AllowedCall("timerfd_gettime", 287, 87, "os.timerfd_gettime"),
    AllowedCall(
        "socketpair",
        53,
        199,
        "asyncio, multiprocessing; connected Unix streams only: datagrams can be sent to sockets of the machine, and "
        "other families would load modules of the kernel",
        tests=(_one_of(0, 1), _one_of(1, 1, mask=EVERY_BIT & ~0x80800), _one_of(2, 0)),  # NONBLOCK and CLOEXEC
    ),
    AllowedCall("sendto", 44, 206, "socket.send, without an address", tests=_NO_ADDRESS),
    AllowedCall("recvfrom", 45, 207, "socket.recv"),
    AllowedCall("sendmsg", 46, 211, "multiprocessing passes descriptors; in flight they count in no process", _MANY),
    AllowedCall("recvmsg", 47, 212, "socket.recvmsg, multiprocessing"),
    AllowedCall("shutdown", 48, 210, "socket.shutdown"),
    AllowedCall("getsockname", 51, 204, "socket.getsockname, asyncio"),
    AllowedCall("getpeername", 52, 205, "socket.getpeername, asyncio"),
    AllowedCall(
        "getsockopt",
        55,
        209,
        "socket.socket(fileno=...); setting options is refused: buffers could take gigabytes",
        tests=(_one_of(1, 1), _one_of(2, *_SOCKET_OPTIONS)),
    ),
)
ALLOWED = (*_FILES_TABLE, *_MEMORY_TABLE, *_PROCESS_TABLE, *_SIGNAL_AND_TIME_TABLE, *_WAITING_TABLE)
"""The table. A call stands in it several times if programs of different kinds may make it with different arguments."""
ABSENT: dict[str, tuple[int, int]] = {
    "clone3": (435, 435),
    "openat2": (437, 437),
}
"""Calls that fail as if the kernel did not have them, since a filter cannot read their structures; the C library then
uses older ones."""
FIRST_UNKNOWN = 451
"""Calls from this number on are not in the tables, and the kernel seems not to have them. So do the x32 calls."""
