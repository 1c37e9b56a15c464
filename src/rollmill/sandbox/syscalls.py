"""Numbers of the system calls that are denied to a program, and of those allowed with some arguments.

Columns: x86_64 (arch/x86/entry/syscalls/syscall_64.tbl), aarch64 (include/uapi/asm-generic/unistd.h); -1 if the
architecture has no such call.
"""

from __future__ import annotations

DENIED: dict[str, tuple[int, int]] = {
    # The network. `socketpair` is allowed: asyncio needs it.
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
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
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # Memory that no limit counts, and objects that outlive a process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Delayed signals: SIGCONT would resume a paused session.
    "timer_create": (222, 107),
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
DENIED_ALONE: dict[str, tuple[int, int]] = {
    # Harmless inside namespaces: other processes, and user ids.
    "execve": (59, 221),
    "execveat": (322, 281),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    # Not covered by Landlock: modes, owners, times, attributes and watches of files.
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    # Descriptors in messages: files in flight are in no process's list of open files.
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # Objects of other processes.
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
}
"""Calls that are denied, in addition, to programs that share the machine's namespaces."""
KILL, TGKILL, PRCTL, FCNTL, IOCTL = (62, 129), (234, 131), (157, 167), (72, 25), (16, 29)
SCHEDULING: dict[str, tuple[int, int]] = {
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
FORKS: dict[str, tuple[int, int]] = {"fork": (57, -1), "vfork": (58, -1)}
CLONE = (56, 220)
CLONE3 = (435, 435)
PRLIMIT64 = (302, 261)
CLOSE_RANGE = (436, 436)
SOCKETPAIR = (53, 199)
FIRST_UNKNOWN = 451
"""Calls from this number on are not in the tables, and are all denied."""
