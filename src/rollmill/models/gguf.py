"""Reads models from GGUF files, the format of llama.cpp, with transformers' own reader (extra `gguf`).

A GGUF file holds configuration, tokenizer and chat template with the weights. Quantised weights are expanded when they
are read, and are trained and saved like any others.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollmill.errors import ModelError

SUFFIX = ".gguf"


def find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file that `path` is, or the only one in a folder without config.json; None: another model.

    Raises:
        ModelError: the folder holds several, such as quantisations of one model or parts of a split one.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:3]) + (", ..." if len(found) > 3 else "")
        raise ModelError(f"{path} holds {len(found)} GGUF files ({names}); give the path of one that is not split")
    return found[0] if found else None


def pretrained_source(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the folder and the options with which `from_pretrained` reads a model of this machine.

    Raises:
        ModelError: it is a GGUF file, and its library is missing; or see `find_gguf`.
    """
    file = find_gguf(path)
    if file is None:
        return path, {"local_files_only": True}
    if find_spec("gguf") is None:
        raise ModelError(f"{file} is a GGUF file, which needs the library gguf: pip install 'rollmill[gguf]'")
    return file.parent, {"gguf_file": file.name, "local_files_only": True}


def forget_quantization(model: Any) -> None:
    """Makes a model whose weights were expanded an ordinary one, so that transformers saves and trains it."""
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False


@contextmanager
def hide_progress() -> Iterator[None]:
    """Hides the progress bar of the expansion, which has no switch."""
    with redirect_stderr(io.StringIO()):
        yield
