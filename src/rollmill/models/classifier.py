"""Reads and writes reward models in Hugging Face format: sequence classifiers with one output."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from rollmill.errors import ModelError, describe_read_error
from rollmill.files import share_files
from rollmill.models.from_scratch import silence_transformers
from rollmill.models.load import read_tokenizer
from rollmill.models.storage import ensure_own_memory

REWARD_MODEL_FOLDER = "reward_model"  #: folder inside a checkpoint


def require_classifier_support(model: Any) -> None:
    """Checks that a reward model of this architecture can be saved.

    Raises:
        ModelError: transformers has no sequence classifier for `model` whose head has no bias.
    """
    classifier = _empty_classifier(copy.deepcopy(model.config))
    head = getattr(classifier, "score", None)
    matches = classifier is not None and type(getattr(classifier, classifier.base_model_prefix)) is type(
        model.base_model
    )
    if not matches or not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(
            f"algorithm `reward_model`: transformers has no sequence classifier for {type(model).__name__}, so no "
            "program could load the reward model; choose another architecture, for example Qwen, Llama, Mistral or "
            "Gemma"
        )


def save_classifier(
    model: Any, network: nn.Module, head: nn.Linear, tokenizer: PreTrainedTokenizerBase, directory: Path, *, end_id: int
) -> None:
    """Writes a folder for AutoModelForSequenceClassification, with the tokenizer.

    transformers takes the score at the last token that is not padding. So a padding token that is also `end_id`, with
    which completions end, is left out of the configuration: then sequences are scored one at a time.

    Args:
        model: the policy, for its architecture.
        network: a network like `model.base_model`.
        head: maps hidden states to one score, without bias.

    Raises:
        OSError: (or safetensors' own error) the folder cannot be written.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.pad_token_id = None if tokenizer.pad_token_id == end_id else tokenizer.pad_token_id
    classifier = _empty_classifier(config)
    setattr(classifier, classifier.base_model_prefix, network)
    classifier.score = head
    with silence_transformers():
        classifier.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    share_files(directory)


def load_classifier(folder: Path, device: torch.device) -> tuple[Any, PreTrainedTokenizerBase]:
    """Loads a classifier, frozen and in evaluation mode, and its tokenizer: float32, on a GPU bfloat16.

    Raises:
        ModelError: the folder holds no sequence classifier with one output, or a file cannot be read.
    """
    where = f"reward `model`: {folder}"
    if not (folder / "config.json").is_file():
        raise ModelError(f"{where} has no config.json; give the folder of a reward model in Hugging Face format")
    options: dict[str, Any] = {"local_files_only": True}
    try:
        with silence_transformers(), torch.random.fork_rng(devices=[]):
            config = AutoConfig.from_pretrained(folder, **options)
            _check(config, where)
            tokenizer = read_tokenizer(folder, options)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=config,
                dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
                output_loading_info=True,
                **options,
            )
    except ModelError:
        raise
    except Exception as error:  # transformers, tokenizers and safetensors each raise errors of their own
        raise ModelError(f"{where} cannot be read: {describe_read_error(error)}") from error
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(f"{where} lacks weights of {type(model).__name__} ({some}); the folder is incomplete")
    ensure_own_memory(model.parameters())
    return model.to(device).eval().requires_grad_(False), tokenizer


def _check(config: Any, where: str) -> None:
    found = ", ".join(config.architectures or ["a model of no named architecture"])
    if "ForSequenceClassification" not in found:
        raise ModelError(
            f"{where} is {found}, not a sequence classifier (...ForSequenceClassification); give a reward model, such "
            "as algorithm `reward_model` writes"
        )
    if config.num_labels != 1:
        raise ModelError(f"{where} has {config.num_labels} outputs, and a reward model has one; give another folder")


def _empty_classifier(config: Any) -> Any:
    """Builds a classifier on the meta device; None if transformers has none for the architecture."""
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        return None
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return AutoModelForSequenceClassification.from_config(config)
