"""Averages the weights of checkpoints of one architecture, tensor by tensor.

W = sum_i w_i W_i with sum_i w_i = 1: model soups (arXiv:2203.05482), and long-to-short by merging a long-CoT model with
a short one (Kimi k1.5, arXiv:2501.12599, section 2.4). Sources are memory-mapped and checked to have one architecture
and vocabulary; files of the result are written one at a time. Shape suffix: N elements of a flattened tensor.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rollmill.errors import CheckpointError, ModelError
from rollmill.files import new_folder, require_free_folder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.model*", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
"""Files of tokenizers that have no tokenizer.json."""

_SEMANTIC_KEYS = (
    *("model_type", "architectures", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "hidden_activation", "layer_types"),
)


@dataclass(frozen=True, slots=True)
class MergeSource:
    """An open checkpoint. Tensors stay on disk until they are read."""

    folder: Path
    config: dict[str, Any]
    file_of: dict[str, str]  #: tensor -> file name
    files: dict[str, Any]  #: file name -> open file
    tied_names: dict[str, str]  #: name in another checkpoint of a tied tensor -> its name here

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor, memory-mapped."""
        name = self.tied_names.get(name, name)
        tensor: torch.Tensor = self.files[self.file_of[name]].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """Returns a tensor's shape without reading the tensor."""
        name = self.tied_names.get(name, name)
        return list(self.files[self.file_of[name]].get_slice(name).get_shape())


def open_merge_source(folder: Path, stack: ExitStack) -> MergeSource:
    """Opens the weight files of a checkpoint until `stack` closes them.

    Raises:
        ModelError: the folder holds no complete, unquantised checkpoint with safetensors.
    """
    try:
        _check_files(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("quantization_config") is not None:
            raise ModelError(f"{folder} is quantised, which cannot be averaged; give the unquantised checkpoint")
        listed = None
        if not (folder / WEIGHTS).is_file():
            listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({WEIGHTS} if listed is None else set(listed.values()))
        lost = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if lost:
            raise ModelError(
                f"{folder} lacks the weight files {_shorten_names(lost)}; the download or copy is incomplete"
            )
        for name in names:
            (folder / name).open(
                "rb"
            ).close()  # Python's error gives the reason; safetensors reports the file as missing
        files = {name: stack.enter_context(safe_open(folder / name, "pt")) for name in names}
        file_of = {tensor: name for name, file in files.items() for tensor in file.keys()}  # noqa: SIM118
        unsaved = sorted(set(listed or ()) - set(file_of))
        if unsaved:
            raise ModelError(
                f"{folder}: {INDEX} names tensors that no file holds ({_shorten_names(unsaved)}); copy it again"
            )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be read: {error}; fix it or copy it again") from error
    return MergeSource(folder, config, file_of, files, {})


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise ModelError(f"{folder} {what}; give the folder of a checkpoint, or a run directory")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds an adapter; merge it into its base model and give that folder")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a checkpoint (no config.json); give a folder in Hugging Face format, or a run directory"
        )
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        raise ModelError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; the copy is incomplete, or of an older format: load it with "
            "transformers and save it again"
        )


def check_compatible(first: MergeSource, other: MergeSource) -> None:
    """Checks that tensors, their meaning and the tokens are the same; records tied tensors in `other`.

    Raises:
        ModelError: they differ.
    """
    ours, theirs = _weight_semantics(first.config), _weight_semantics(other.config)
    for key in sorted(ours.keys() & theirs.keys()):
        if ours[key] != theirs[key]:
            raise ModelError(
                f"{other.folder}: config.json: {key} is {theirs[key]}, but {ours[key]} in {first.folder}; only "
                "checkpoints of one architecture can be averaged"
            )
    _check_tensors(first, other)
    a, b = _vocabulary(first.folder), _vocabulary(other.folder)
    different = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))
    if different:
        raise ModelError(
            f"{other.folder}: the tokenizer differs from that of {first.folder} in "
            f"{len(different)} tokens ({_shorten_names([repr(token) for token in different])}); if the model was "
            "trained with the same ids, copy the tokenizer files of the first there"
        )


def _weight_semantics(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that define the meaning of a checkpoint's tensors beyond their names and shapes."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {key: config.get(key) for key in _SEMANTIC_KEYS} | {
        "rope_theta": config.get("rope_theta", rope.get("rope_theta")),
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
    }
    return {key: value for key, value in found.items() if value is not None}


def _check_tensors(first: MergeSource, other: MergeSource) -> None:
    for name in first.file_of:
        if name not in other.file_of and (twin := _twin(first, name)) in other.file_of:
            other.tied_names[name] = twin
    missing = sorted(name for name in first.file_of if name not in other.file_of and name not in other.tied_names)
    extra = sorted(name for name in other.file_of if name not in first.file_of and not _twin(other, name))
    for here, there, names in ((other, first, missing), (first, other, extra)):
        if names:
            raise ModelError(
                f"{here.folder} lacks {len(names)} tensors that {there.folder} has ({_shorten_names(names)}); only "
                "checkpoints with the same tensors can be averaged"
            )
    for name in first.file_of:
        if first.shape(name) != other.shape(name):
            raise ModelError(
                f"{other.folder}: {name} has shape {other.shape(name)}, but {first.shape(name)} in {first.folder}; "
                "only checkpoints of one size and vocabulary can be averaged"
            )


def _twin(source: MergeSource, name: str) -> str:
    """Name of another matrix of the checkpoint that is bit for bit equal, or "".

    Some programs save tied embeddings once, others twice.
    """
    shape = source.shape(name)
    for other in source.file_of:
        same = other != name and len(shape) == 2 and source.shape(other) == shape
        if same and torch.equal(source.tensor(other), source.tensor(name)):
            return other
    return ""


def _vocabulary(folder: Path) -> dict[str, int]:
    try:
        if (folder / "tokenizer.json").is_file():
            return dict(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab())
        if any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
            return dict(AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab())
    except Exception as error:  # tokenizers and transformers each raise errors of their own
        raise ModelError(f"{folder}: the tokenizer cannot be read: {error}") from error
    raise ModelError(f"{folder} has no tokenizer (tokenizer.json); copy the tokenizer files of its base model there")


def _shorten_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PIECE = 1 << 22  # elements that are averaged at once: 32 MiB in float64
_COPIED = (
    *("config.json", "generation_config.json", "*.py", *VOCABULARIES, "tokenizer.json", "tokenizer_config.json"),
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*", "additional_chat_templates/*"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)


def merge_checkpoints(
    folders: Sequence[Path], out: Path, shares: Sequence[float], *, method: str = "linear", dtype: str | None = None
) -> dict[str, Any]:
    """Writes the average of checkpoints as a Hugging Face folder, atomically.

    Names of tensors and files, configuration and tokenizer are those of the first checkpoint. Sums are in float64.

    Args:
        folders: two or more Hugging Face folders with safetensors.
        out: the new folder; may exist if it is empty.
        shares: the w_i, one per folder, with sum 1. A negative one extrapolates.
        method: `linear`, or `slerp` for two folders: interpolates along the arc between the two directions of each
            tensor (Shoemake 1985, doi:10.1145/325334.325242).
        dtype: `fp32`, `bf16` or `fp16`; default: the type of each tensor in the first checkpoint.

    Returns:
        out, method, checkpoints, weights (the shares), tensors, parameters, dtypes.

    Raises:
        ConfigError: `out` is not empty or is a file.
        ModelError: a folder is not a complete checkpoint, does not match the first, or holds non-finite values.
        CheckpointError: the result cannot be written.
    """
    assert len(folders) == len(shares)
    try:
        out = require_free_folder(out)
        with ExitStack() as stack:
            sources = [open_merge_source(folder, stack) for folder in folders]
            for other in sources[1:]:
                check_compatible(sources[0], other)
            with new_folder(out) as temporary:
                copy_settings(folders[0], temporary, dtype)
                written = _write_tensors(sources, shares, method, DTYPES[dtype] if dtype else None, temporary)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the merged checkpoint {out}: {error}. Free some space or fix the permissions, or choose "
            "another folder with --out."
        ) from error
    return {
        "out": str(out),
        "method": method,
        "checkpoints": [str(folder) for folder in folders],
        "weights": list(shares),
        **written,
    }


def copy_settings(folder: Path, target: Path, dtype: str | None) -> None:
    """Copies the files of a checkpoint that describe its model and tokenizer.

    Args:
        dtype: a key of `DTYPES`, which config.json then names; default: unchanged.
    """
    for pattern in _COPIED:
        for path in folder.glob(pattern):
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    if dtype:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        for part in (config, *(each for each in config.values() if isinstance(each, dict))):
            if part is config or "dtype" in part or "torch_dtype" in part:  # the parts of a vision-language model
                part.pop("torch_dtype", None)  # the key's name in transformers 4
                part["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_tensors(
    sources: list[MergeSource], shares: Sequence[float], method: str, dtype: torch.dtype | None, target: Path
) -> dict[str, Any]:
    """Writes the files of the first checkpoint with averaged tensors; returns counts for the summary."""
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
    """Yields the same slice of all tensors, in float64."""
    for pieces_N in zip(*(part_N.split(_PIECE) for part_N in parts_N), strict=True):
        yield [piece_N.double() for piece_N in pieces_N]


def _slerp_factors(parts_N: list[torch.Tensor], t: float) -> list[float]:
    """Factors of two tensors at the fraction `t` of the arc between them: sin((1-t)a)/sin a and sin(ta)/sin a.

    If the two are parallel, opposite or zero, interpolates linearly.
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
