"""The files of this machine that programs may read: Python, the C libraries, and packages that the caller names."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.root_filesystem import PACKAGES, FilesystemView

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_SITES = ("site-packages", "dist-packages")


def find_interpreter() -> str:
    """Return the Python program outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def build_filesystem_view(packages: Sequence[str]) -> FilesystemView:
    """Return the file view of programs that may import `packages` (import names).

    Each package includes everything that its distribution installs, but not its dependencies; these must be named too.
    Raises SandboxError for a package that is not installed and for a Python below /tmp.
    """
    library = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})
    shared = sorted(str(path) for path in Path(sys.base_prefix, "lib").glob("libpython*.so*"))
    paths = [path for path in _LIBRARIES if os.path.exists(path)]
    paths += [path for path in (find_interpreter(), library, *shared) if path not in paths]
    if any(path.startswith("/tmp/") for path in paths):
        raise SandboxError(
            f"Python is installed below /tmp ({sys.base_prefix}), which programs see as their own folder"
        )
    homes = [Path(library), Path(library).parent / "python3", Path("/usr/lib/python3")]
    hidden = {str(home / site) for home in homes for site in _SITES if (home / site).is_dir()}
    seen = sorted(folder for folder in hidden if any(folder.startswith(path + "/") for path in paths))
    binds = {path: path for path in paths}
    for name in packages:
        binds |= _installed(name)
    return FilesystemView(binds, seen)


def _installed(name: str) -> dict[str, str]:
    """Return everything that the distributions of one import name install beside it."""
    owners = metadata.packages_distributions().get(name)
    if not owners:
        raise SandboxError(f"package {name!r} cannot be allowed in the sandbox: it is not installed here")
    found = {}
    for owner in set(owners):
        distribution = metadata.distribution(owner)
        tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
        for top in tops:
            path = str(distribution.locate_file(top))
            if os.path.exists(path):
                found[f"{PACKAGES}/{top}"] = path
    return found
