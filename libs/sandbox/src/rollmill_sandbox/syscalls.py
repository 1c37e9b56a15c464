"""Names and numbers of system calls that no program may make, for reports and attacks.

The filter does not need this table: it refuses every call that `allowed_syscalls` does not list. Columns: x86_64,
aarch64; -1 if the architecture has no such call.
"""

from __future__ import annotations

from rollmill_sandbox.allowed_syscalls import ABSENT, ALLOWED

DENIED: dict[str, tuple[int, int]] = {
    # The network, and options of sockets: buffers of a socket can be made to hold a gigabyte.
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),
    "sendmmsg": (307, 269),
    "recvmmsg": (299, 243),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "execveat": (322, 281),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "fanotify_init": (300, 262),
    # Files of the machine: locks and watches of files that programs may only read, and flushing its disks.
    "flock": (73, 32),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "readahead": (187, 213),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # Memory that no limit counts, and objects that outlive a process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "mlock": (149, 228),
    "mlock2": (325, 284),
    "mlockall": (151, 230),
    "remap_file_pages": (216, 234),
    "io_setup": (206, 0),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "shmdt": (67, 197),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Delayed signals: SIGCONT would resume a paused session.
    "timer_create": (222, 107),
    "signalfd": (282, -1),
    "signalfd4": (289, 74),
    # Large parts of the kernel that no program needs.
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "personality": (135, 92),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "uselib": (134, -1),
    "ustat": (136, -1),
    "sysfs": (139, -1),
    "modify_ldt": (154, -1),
    # The machine.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}

UNFILTERED: dict[str, tuple[int, int]] = {"uretprobe": (335, -1), "uprobe": (336, -1)}
"""Calls that newer kernels pass by every filter. Outside of probes that root has placed, they fail or end a process."""


def find_numbers(name: str) -> tuple[int, int]:
    """Return the numbers of a call on x86_64 and aarch64. KeyError for a call that is in no table."""
    allowed = {call.name: (call.x86_64, call.aarch64) for call in ALLOWED}
    return (allowed | ABSENT | DENIED)[name]


def find_name(number: int, machine: str) -> str:
    """Return the name of a call, or its number if it is in no table."""
    for call in ALLOWED:
        if call.number(machine) == number:
            return call.name
    for name, numbers in (DENIED | ABSENT | UNFILTERED).items():
        if numbers[machine == "aarch64"] == number:
            return name
    return f"call {number}"
