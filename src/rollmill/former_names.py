"""Former import paths of what users' files were told to import: runs that an earlier version began still resume.

No module has such a name any more; nothing in rollmill itself imports them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Former module -> the module now, and names that changed in it.
_MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "rollmill.core": ("rollmill.types", {"Source": "ExperienceSource"}),
    "rollmill.core.types": ("rollmill.types", {"Source": "ExperienceSource"}),
    "rollmill.core.errors": ("rollmill.errors", {}),
    "rollmill.explorer": ("rollmill.rollout", {}),
    "rollmill.explorer.dialogue": ("rollmill.rollout.policy", {"Dialogue": "PolicyConversation"}),
    "rollmill.explorer.environments": ("rollmill.rollout.environments", {}),
    "rollmill.recipes": ("rollmill.config.algorithms", {}),
    "rollmill.tasks": ("rollmill.data", {}),
    "rollmill.tasks.images": ("rollmill.data.images", {}),
    "rollmill.tasks.verifiers": ("rollmill.data.verifiers", {}),
}


class _FormerModule(ModuleType):
    """A module whose attributes are those of the module that took its place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module, names = _MODULES[self.__name__]
        return getattr(importlib.import_module(module), names.get(name, name))


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in _MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _FormerModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty: attributes are looked up when they are asked for."""


def find_former_names() -> None:
    """Let users' files import from former paths, from now on in this process."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # first: a folder that an update has left empty is a package, too
