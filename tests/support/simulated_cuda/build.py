"""Compiles the two libraries of the simulation at their first use."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_CACHE = _HERE.parents[2] / "build" / "simulated_cuda"
_TORCH = "2.13."
"""The version whose table of CUDA hooks `device.cpp` fills; another one has other entries."""
_HAS_CUDA = torch.version.cuda is not None  # before the simulation says so
_PARTS = {"device": ("-ltorch_cpu", "-lc10"), "nccl": ("-ltorch_python", "-ltorch_cpu", "-lc10")}


def missing() -> str | None:
    """Why the simulation cannot be used here; None if it can."""
    if _HAS_CUDA:
        return "this build of torch has CUDA: use a GPU"
    if not torch.__version__.startswith(_TORCH):
        return f"the simulated CUDA device is made for torch {_TORCH}x, not {torch.__version__}"
    if shutil.which("g++") is None:
        return "the simulated CUDA device needs g++"
    return None


def device_library() -> Path:
    """Path of the library of `device.cpp`, compiled if it is not there. Raises RuntimeError."""
    return _compiled("device", ".so")


def nccl_module() -> Path:
    """Path of the extension module of `nccl.cpp`, whose name is `nccl`. Raises RuntimeError."""
    return _compiled("nccl", sysconfig.get_config_var("EXT_SUFFIX"))


def _compiled(name: str, suffix: str) -> Path:
    source = _HERE / f"{name}.cpp"
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode() + source.read_bytes()).hexdigest()[:16]
    library = _CACHE / key / f"{name}{suffix}"
    if library.exists():
        return library
    if (reason := missing()) is not None:
        raise RuntimeError(reason)
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:  # others start at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            compiled = subprocess.run(_command(name, source, made), capture_output=True, text=True)
            if compiled.returncode:
                raise RuntimeError(f"{source} does not compile:\n{compiled.stderr[-4000:]}")
            made.rename(library)
    return library


def _command(name: str, source: Path, target: Path) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    include = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D", "-DUSE_C10D_GLOO"]
    return [
        "g++",
        *flags,
        f"-DTORCH_EXTENSION_NAME={name}",
        *(f"-I{each}" for each in include),
        f"-L{torch_folder / 'lib'}",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
        str(source),
        "-o",
        str(target),
        *_PARTS[name],
    ]
