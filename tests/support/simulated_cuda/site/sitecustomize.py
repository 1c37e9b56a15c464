"""Installs the simulated CUDA device right after torch is imported, in each Python with this folder on its path."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


class _AfterTorch:
    """Finds torch as usual; when it has been executed, the simulation is installed."""

    looking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "torch" or self.looking:
            return None
        self.looking = True
        spec = importlib.util.find_spec("torch")
        self.looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            from support.simulated_cuda import install

            install()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SIMULATED_CUDA") == "1":
    sys.path.append(str(Path(__file__).resolve().parents[3]))  # the package `support`
    sys.meta_path.insert(0, _AfterTorch())
