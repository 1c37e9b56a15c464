"""Averaging the weights of checkpoints of one architecture, tensor by tensor.

W = sum_i w_i W_i with sum_i w_i = 1: model soups (arXiv 2203.05482), and long-to-short by merging a long-CoT model with
a short one (Kimi k1.5, arXiv 2501.12599, section 2.4). Sources are mapped into memory, and one file of the result is
made at a time. Shape suffix: N elements of a tensor laid flat.
"""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollmill.errors import CheckpointError, ConfigError, ModelError
from rollmill.models.merge_sources import INDEX, VOCABULARIES, WEIGHTS, MergeSource, check_compatible, open_merge_source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PIECE = 1 << 22  # elements that are averaged at once: 32 MiB in float64
_COPIED = (
    *("config.json", "generation_config.json", "*.py", *VOCABULARIES, "tokenizer.json", "tokenizer_config.json"),
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*", "additional_chat_templates/*"),
)


def merge_checkpoints(
    folders: Sequence[Path], out: Path, shares: Sequence[float], *, method: str = "linear", dtype: str | None = None
) -> dict[str, Any]:
    """Write the average of checkpoints as a Hugging Face folder that appears whole or not at all.

    Names of tensors and files, configuration and tokenizer are those of the first checkpoint. Sums are in float64.

    Args:
        folders: two or more Hugging Face folders with safetensors.
        out: the new folder; may exist if it is empty.
        shares: the w_i, one per folder, with sum 1. A negative one extrapolates.
        method: `linear`, or `slerp` for two folders: each tensor moves along the arc between the two directions
            (Shoemake 1985, doi:10.1145/325334.325242).
        dtype: `fp32`, `bf16` or `fp16`; default the type of each tensor in the first checkpoint.

    Returns:
        out, method, checkpoints, weights (the shares), tensors, parameters, dtypes.

    Raises:
        ConfigError: `out` is taken.
        ModelError: a folder is no whole checkpoint, does not fit the first, or holds values that are not finite.
        CheckpointError: the result cannot be written.
    """
    assert len(folders) == len(shares)
    try:
        out = _require_free_path(out)
        temporary = out.with_name(f".{out.name}.writing-{os.getpid()}")
        with ExitStack() as stack:
            sources = [open_merge_source(folder, stack) for folder in folders]
            for other in sources[1:]:
                check_compatible(sources[0], other)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            for left in out.parent.glob(f".{glob.escape(out.name)}.writing-*"):  # of merges that were killed
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
            _copy_settings(folders[0], temporary, dtype)
            written = _write_tensors(sources, shares, method, DTYPES[dtype] if dtype else None, temporary)
            for path in [*temporary.rglob("*"), temporary]:
                _fsync(path)
            temporary.rename(out)
            _fsync(out.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the merged checkpoint {out}: {error}. Free some space or mend the permissions, or choose "
            "another folder with --out."
        ) from error
    return {
        "out": str(out),
        "method": method,
        "checkpoints": [str(folder) for folder in folders],
        "weights": list(shares),
        **written,
    }


def _require_free_path(out: Path) -> Path:
    """`out` without links. Raises ConfigError unless a new folder can take its name."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; choose another folder with --out")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; choose another folder with --out")
    return out.resolve()


def _copy_settings(folder: Path, target: Path, dtype: str | None) -> None:
    for pattern in _COPIED:
        for path in folder.glob(pattern):
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    if dtype:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)  # what transformers 4 called it
        config["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_tensors(
    sources: list[MergeSource], shares: Sequence[float], method: str, dtype: torch.dtype | None, target: Path
) -> dict[str, Any]:
    """Write the files of the first checkpoint with averaged tensors; counts for the summary."""
    first = sources[0]
    size = parameters = 0
    dtypes: set[torch.dtype] = set()
    for file in first.files:
        names = [name for name, home in first.file_of.items() if home == file]
        merged = {name: _merged(name, sources, shares, method, dtype) for name in names}
        save_file(merged, target / file, {"format": "pt"})
        size += sum(tensor.nbytes for tensor in merged.values())
        parameters += sum(tensor.numel() for tensor in merged.values())
        dtypes |= {tensor.dtype for tensor in merged.values()}
    if WEIGHTS not in first.files:
        index = {"metadata": {"total_size": size, "total_parameters": parameters}, "weight_map": first.file_of}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return {
        "tensors": len(first.file_of),
        "parameters": parameters,
        "dtypes": sorted(str(each).removeprefix("torch.") for each in dtypes),
    }


def _merged(
    name: str, sources: list[MergeSource], shares: Sequence[float], method: str, dtype: torch.dtype | None
) -> torch.Tensor:
    original = sources[0].tensor(name)
    if not original.is_floating_point():
        for source in sources[1:]:
            if not torch.equal(source.tensor(name), original):
                raise ModelError(
                    f"{source.folder}: {name} ({original.dtype}) differs from that of {sources[0].folder}; only "
                    "floating-point tensors can be averaged"
                )
        return original.clone()
    used = [(source, share) for source, share in zip(sources, shares, strict=True) if share]
    parts_N = [source.tensor(name).reshape(-1) for source, _ in used]
    factors = [share for _, share in used]
    if method == "slerp" and len(used) == 2:
        factors = _slerp_factors(parts_N, factors[1])
    result = torch.empty(original.shape, dtype=dtype or original.dtype)
    for target_N, pieces_N in zip(result.view(-1).split(_PIECE), _pieces(parts_N), strict=True):
        total_N = factors[0] * pieces_N[0]
        for factor, piece_N in zip(factors[1:], pieces_N[1:], strict=True):
            total_N.add_(piece_N, alpha=factor)
        target_N.copy_(total_N)
    if not result.isfinite().all():
        for (source, _), part_N in zip(used, parts_N, strict=True):
            if not part_N.isfinite().all():
                raise ModelError(f"{source.folder}: {name} holds values that are not finite; that checkpoint is broken")
        raise ModelError(f"{name}: the average is beyond the largest {result.dtype}; choose another --dtype")
    return result


def _pieces(parts_N: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same stretch of all tensors, in float64."""
    for pieces_N in zip(*(part_N.split(_PIECE) for part_N in parts_N), strict=True):
        yield [piece_N.double() for piece_N in pieces_N]


def _slerp_factors(parts_N: list[torch.Tensor], t: float) -> list[float]:
    """Factors of two tensors at the fraction `t` of the arc between them: sin((1-t)a)/sin a and sin(ta)/sin a.

    Where the two are parallel, opposite or zero there is no arc, and the factors are those of the line.
    """
    dot = squares_a = squares_b = 0.0
    for a_N, b_N in _pieces(parts_N):
        dot += float(a_N @ b_N)
        squares_a += float(a_N @ a_N)
        squares_b += float(b_N @ b_N)
    lengths = math.sqrt(squares_a) * math.sqrt(squares_b)
    angle = math.acos(max(-1.0, min(1.0, dot / lengths))) if lengths and math.isfinite(dot) else 0.0
    if math.sin(angle) < 1e-6:
        return [1.0 - t, t]
    return [math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
