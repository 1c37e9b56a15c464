"""Landlock (Linux 5.13): a second wall around the file system. https://docs.kernel.org/userspace-api/landlock.html"""

from __future__ import annotations

import ctypes
import os
import struct

from rollmill.sandbox.kernel import syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on both architectures
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_LATEST_FILE_RIGHTS = 16
_NETWORK_RIGHTS = 3
_SCOPES = 3  # abstract Unix sockets and signals stay inside
_RULE_PATH_BENEATH = 1


def landlock_version() -> int:
    """The version of Landlock in this kernel, 0 where it has none."""
    try:
        return syscall("landlock_create_ruleset", _CREATE, 0, 0, 1)
    except OSError:
        return 0


def restrict_files(version: int, writable: str) -> None:
    """Let this process read everything that it sees, write below `writable` only, and use no network.

    It has given up its privileges before (PR_SET_NO_NEW_PRIVS). `version` is landlock_version(), above 0.
    """
    every = (1 << _FILE_RIGHTS.get(version, _LATEST_FILE_RIGHTS)) - 1
    attributes = struct.pack("=Q", every)
    if version >= 4:
        attributes += struct.pack("=Q", _NETWORK_RIGHTS)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPES)
    rules = syscall("landlock_create_ruleset", _CREATE, attributes, len(attributes), 0)
    devices = _READ_FILE | _READ_DIR | _WRITE_FILE
    for folder, rights in (("/", _EXECUTE | _READ_FILE | _READ_DIR), ("/dev", devices), (writable, every)):
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        syscall("landlock_add_rule", _ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0)
        os.close(descriptor)
    syscall("landlock_restrict_self", _RESTRICT, rules, 0)
    os.close(rules)
