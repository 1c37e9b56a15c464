"""Checkpoints to be averaged: opened, and checked to be of one architecture and vocabulary."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rollmill.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.model*", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
"""Files of tokenizers without tokenizer.json."""

_SEMANTIC_KEYS = (
    *("model_type", "architectures", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "hidden_activation", "layer_types"),
)


@dataclass(frozen=True, slots=True)
class MergeSource:
    """An open checkpoint. Tensors stay on disk until they are asked for."""

    folder: Path
    config: dict[str, Any]
    file_of: dict[str, str]  #: tensor -> file name
    files: dict[str, Any]  #: file name -> open file
    tied_names: dict[str, str]  #: tensor of this checkpoint that another saves under a second name -> tensor here

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, mapped into memory."""
        name = self.tied_names.get(name, name)
        tensor: torch.Tensor = self.files[self.file_of[name]].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """Its shape, without reading it."""
        name = self.tied_names.get(name, name)
        return list(self.files[self.file_of[name]].get_slice(name).get_shape())


def open_merge_source(folder: Path, stack: ExitStack) -> MergeSource:
    """Open the weight files of a checkpoint until `stack` closes them.

    Raises ModelError unless the folder holds a whole, unquantised checkpoint with safetensors.
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
            (folder / name).open("rb").close()  # Python says why it cannot be read; safetensors calls it missing
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
        raise ModelError(f"{folder} cannot be read: {error}; mend it or copy it again") from error
    return MergeSource(folder, config, file_of, files, {})


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise ModelError(f"{folder} {what}; give the folder of a checkpoint, or a run directory")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds an adapter; merge it into its base model and give that folder")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is no checkpoint (no config.json); give a folder in Hugging Face format, or a run directory"
        )
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        raise ModelError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; the copy is incomplete, or of an older format: load it with "
            "transformers and save it again"
        )


def check_compatible(first: MergeSource, other: MergeSource) -> None:
    """Raise ModelError unless both have the same tensors, in meaning and shape, and tokens; notes twins in `other`."""
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
    """What a checkpoint's tensors mean, as far as their names and shapes do not say it."""
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
    """Another matrix of the checkpoint that is equal bit for bit, or nothing.

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
