"""Landlock (Linux 5.13): file system access rules. https://docs.kernel.org/userspace-api/landlock.html"""

from __future__ import annotations

import ctypes
import os
import stat
import struct

from rollmill_sandbox.kernel import syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on both architectures
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READS = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_LATEST_FILE_RIGHTS = 16
_NETWORK_RIGHTS = 3
_SCOPES = 3  # abstract Unix sockets and signals stay inside
_RULE_PATH_BENEATH = 1


def landlock_version() -> int:
    """Return the version of Landlock in this kernel, 0 if it has none."""
    try:
        return syscall("landlock_create_ruleset", _CREATE, 0, 0, 1)
    except OSError:
        return 0


class LandlockRuleset:
    """A set of rules. A process that restricts itself with several sets can do only what all of them allow.

    `version` is landlock_version(), above 0. With `reads_only`, the rules cover only reading and running files.
    """

    def __init__(self, version: int, reads_only: bool = False) -> None:
        self._every = _READS if reads_only else (1 << _FILE_RIGHTS.get(version, _LATEST_FILE_RIGHTS)) - 1
        attributes = struct.pack("=Q", self._every)
        if version >= 4:
            attributes += struct.pack("=Q", _NETWORK_RIGHTS)
        if version >= 6:
            attributes += struct.pack("=Q", _SCOPES)
        self._rules = syscall("landlock_create_ruleset", _CREATE, attributes, len(attributes), 0)

    def allow_reading(self, path: str) -> None:
        """Allow to read and run a file, or everything below a folder."""
        self._add(path, _READS)

    def allow_listing(self, path: str) -> None:
        """Allow to list the names below a folder."""
        self._add(path, _READ_DIR)

    def allow_writing(self, path: str) -> None:
        """Allow to read and write a file."""
        self._add(path, _READ_FILE | _WRITE_FILE)

    def allow_all(self, path: str) -> None:
        """Allow everything below a folder."""
        self._add(path, self._every)

    def restrict(self) -> None:
        """Restrict this process. Requires PR_SET_NO_NEW_PRIVS."""
        syscall("landlock_restrict_self", _RESTRICT, self._rules, 0)
        self.close()

    def close(self) -> None:
        """Close the set. A process that it restricts stays restricted."""
        os.close(self._rules)

    def _add(self, path: str, rights: int) -> None:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _EXECUTE | _WRITE_FILE | _READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        syscall("landlock_add_rule", _ADD_RULE, self._rules, _RULE_PATH_BENEATH, rule, 0)
        os.close(descriptor)


def restrict_files(version: int, writable: str) -> None:
    """Let this process read all visible files, write below `writable` only, and use no network.

    Requires PR_SET_NO_NEW_PRIVS. `version` is landlock_version(), above 0.
    """
    build_rules(version, writable).restrict()


def build_rules(version: int, writable: str) -> LandlockRuleset:
    """Return the rules of `restrict_files`."""
    rules = LandlockRuleset(version)
    rules.allow_reading("/")
    rules.allow_writing("/dev")
    rules.allow_all(writable)
    return rules
