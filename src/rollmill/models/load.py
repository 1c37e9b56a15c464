"""Loads or builds the policy with its tokenizer and its end-of-sequence ids; also loads teachers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rollmill.config.checks.pictures import BOTH_WAYS, VISION_MODELS
from rollmill.config.hub import fetch_config, parse_reference
from rollmill.config.model import ModelConfig, NewModelConfig
from rollmill.data.picture_prompts import read_processor
from rollmill.data.renderer import renderer_of
from rollmill.errors import ChatTemplateError, ModelError, describe_read_error
from rollmill.models.from_scratch import build_new_meta_model, init_model, silence_transformers, train_tokenizer
from rollmill.models.gguf import find_gguf, forget_quantization, hide_progress, pretrained_source
from rollmill.models.hf_forward import picture_prompts
from rollmill.models.lora import BASE_FOLDER, add_lora
from rollmill.models.merged_checkpoint import stored_tensors, stored_type
from rollmill.models.quantization import Quantization, quantize_linears
from rollmill.models.recurrent import recurrent_layers
from rollmill.models.storage import ensure_own_memory, narrow_weights
from rollmill.models.vision import picture_processor, text_model

log = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_UNLIMITED = 1 << 20  # tokens: context of recurrent models that specify none
_VOCABULARIES = ("tokenizer.json", "tokenizer.model*", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A model ready for training: weights on `device`, no dropout."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]  #: ids that end a sequence; never empty
    pad_id: int
    context: int  #: longest sequence in tokens
    device: torch.device

    @property
    def end_id(self) -> int:
        """End-of-sequence id appended to demonstrations."""
        own: int | None = self.tokenizer.eos_token_id
        return min(self.eos_ids) if own is None else own


def load_policy(
    config: ModelConfig,
    *,
    texts: Iterable[str] | Callable[[], Iterable[str]],
    seed: int,
    device: torch.device,
    pictures: bool = False,
    dtype: torch.dtype = torch.float32,
    stays_in_files: bool = False,
) -> PolicyModel:
    """Loads the checkpoint folder or GGUF file `config.path`, or builds the model described by `config.new`.

    Args:
        config: the `model` section.
        texts: training text of a new model's tokenizer; ignored for a checkpoint.
        seed: seed of a new model's weights.
        device: device of the weights.
        pictures: accept a vision-language model, whose model and tokenizer then have a `picture_processor`.
        dtype: float32 or bfloat16; adapters are float32 whatever it is.
        stays_in_files: weights are in the memory of the folder's files where these allow it, and in their type;
            `device` is the CPU. See `leave_in_files`.

    Raises:
        ModelError: the folder is not a causal language model with weights and a matching tokenizer.
    """
    stored = None
    if isinstance(config.path, Path):
        stays = stays_in_files and config.lora is None and config.quantization is None
        stored = stored_type(config.path, dtype) if stays else None
        trust = config.trust_remote_code
        model, tokenizer = _read(config.path, trust, pictures, dtype, config.quantization, stored)
        where = str(config.path)
    else:
        new = config.new or NewModelConfig()
        tokenizer = train_tokenizer(new.tokenizer, texts() if callable(texts) else texts)
        model, where = init_model(new, tokenizer, seed), "the new model"
    if dtype == torch.bfloat16 and stored is None:
        narrow_weights(model)
    if config.lora is not None:
        add_lora(model, config.lora, seed)
    return wrap_policy(model, tokenizer, device, where)


def wrap_policy(model: Any, tokenizer: Any, device: torch.device, where: str) -> PolicyModel:
    """Prepares a loaded model for training, in place: its end-of-sequence ids, padding, context and device.

    Args:
        where: names the model in errors.

    Raises:
        ModelError: no token ends a sequence, or the context is unknown.
    """
    eos_ids = _end_ids(model, tokenizer, where)
    tokenizer.stop_ids = eos_ids
    with suppress(ChatTemplateError):  # no chat template, or one that chats will refuse
        eos_ids |= renderer_of(tokenizer).stop_ids
    pad_id = [
        *_as_ids(tokenizer.pad_token_id),
        *_as_ids(getattr(model.config, "pad_token_id", None)),
        *sorted(eos_ids),
    ][0]
    _settle_generation(model, eos_ids, pad_id, where)
    model.to(device)
    return PolicyModel(model.train(), tokenizer, eos_ids, pad_id, _context(model, where), device)


def load_teacher(folder: Path, policy: PolicyModel) -> PreTrainedModel:
    """Loads a frozen model whose next-token distributions can be compared with the policy's.

    A vision-language policy has a vision-language teacher, which sees what the policy's processor makes of pictures.

    Raises:
        ModelError: the folder is not a model of the policy's kind, its vocabulary is not the policy's, or its processor
            prepares pictures otherwise.
    """
    sees = picture_processor(policy.model) is not None
    teacher, tokenizer = _read(folder, trust=False, pictures=sees)
    rows = [model.get_output_embeddings().weight.shape[0] for model in (teacher, policy.model)]
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab() or rows[0] != rows[1]:
        raise ModelError(
            f"algorithm.teacher: {folder} has another vocabulary than the policy ({rows[0]} and {rows[1]} rows), so "
            "their distributions cannot be compared; choose a teacher of the same family"
        )
    if sees and picture_processor(teacher) is None:
        raise ModelError(
            f"algorithm.teacher: {folder} is a text model, and the policy sees pictures; choose one that does"
        )
    if sees and not _prepare_equally(teacher, policy.model):
        raise ModelError(
            f"algorithm.teacher: the processor of {folder} prepares pictures otherwise than the policy's, so the "
            "teacher cannot read its prompts; choose a teacher of the same family and with the same processor settings"
        )
    frozen: PreTrainedModel = teacher.to(policy.device).requires_grad_(False).eval()
    return frozen


def _prepare_equally(one: Any, other: Any) -> bool:
    """True if the processors of two vision-language models have the same settings and encode samples equally."""
    settings = [model.picture_processor.processor.image_processor.to_dict() for model in (one, other)]
    samples = zip(picture_prompts(one), picture_prompts(other), strict=True)
    return settings[0] == settings[1] and all(
        a.token_ids == b.token_ids
        and a.inputs.keys() == b.inputs.keys()
        and all(torch.equal(value, b.inputs[name]) for name, value in a.inputs.items())
        for a, b in samples
    )


def build_meta_model(
    folder: Path, trust: bool = False, weights: bool = True, pictures: bool = False
) -> PreTrainedModel:
    """Builds the model of a checkpoint folder on the meta device, to read its sizes.

    Args:
        trust: run model code found in the folder.
        weights: require that the folder also has weights and a tokenizer.
        pictures: accept a vision-language model.

    Raises:
        ModelError: the folder is not a causal language model.
    """
    place, options = _check_source(folder, trust) if weights else (folder, {"local_files_only": True})
    options["trust_remote_code"] = trust
    with silence_transformers(), torch.device("meta"), torch.random.fork_rng(devices=[]):
        config = _read_config(folder, place, options)
        kind = AutoModelForImageTextToText if _check_config(config, folder, pictures) else AutoModelForCausalLM
        empty: PreTrainedModel = kind.from_config(config, trust_remote_code=trust)
    return empty


def build_meta_policy(config: ModelConfig) -> PreTrainedModel:
    """Builds the policy without weights, in fp32 and with its adapters, to read its sizes.

    Of a model of the hub only the configuration is fetched.

    Raises:
        ModelError: the folder is not a model that can be trained.
    """
    if config.path == "new":
        model = build_new_meta_model(config.new or NewModelConfig())
    else:
        folder = config.path
        reference = None if folder.exists() else parse_reference(str(folder))
        if reference is not None:
            folder = fetch_config(reference)
        model = build_meta_model(folder, config.trust_remote_code, weights=reference is None, pictures=True)
    model.float()
    if config.quantization is not None:
        quantize_linears(model, config.quantization)
    if config.lora is not None:
        with torch.device("meta"):
            add_lora(model, config.lora, seed=0)
    return model


def _read(
    folder: Path,
    trust: bool,
    pictures: bool = False,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
    stored: torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reads a model and its tokenizer.

    Args:
        stored: the type of all weights in the files, in which they stay there.
    """
    place, options = _check_source(folder, trust)
    options["trust_remote_code"] = trust
    with silence_transformers(), hide_progress() if "gguf_file" in options else nullcontext():
        config = _read_config(folder, place, options)
        sees = _check_config(config, folder, pictures)
        for part in (config, *((config.text_config, config.vision_config) if sees else ())):
            _remove_dropout(part, folder)
        tokenizer = _read_or_model_error(lambda: read_tokenizer(place, options), folder, "the tokenizer")
        model, info = _read_or_model_error(
            lambda: (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
                place, config=config, dtype=stored or dtype, output_loading_info=True, **options
            ),
            folder,
            "the weights",
        )
        if sees:
            token = config.image_token_id
            both = BOTH_WAYS.get(config.model_type)
            processor = _read_or_model_error(
                lambda: read_processor(folder, options, token, both), folder, "the processor"
            )
            setattr(model, "picture_processor", processor)  # noqa: B010  (an attribute that transformers does not know)
            setattr(tokenizer, "picture_processor", processor)  # noqa: B010
    if stored not in (None, dtype) and any(buffer.dtype == stored for buffer in model.buffers()):
        return _read(folder, trust, pictures, dtype, quantization)  # buffers would be rounded
    forget_quantization(model)
    _check_weights(model, info, folder)
    _check_vocabulary(model, tokenizer, folder)
    if quantization is not None:
        _check_layout(model, folder)
        quantize_linears(model, quantization)
        setattr(model, BASE_FOLDER, folder)
    if stored is None:
        ensure_own_memory(model.parameters())
        return model, tokenizer
    for part in (model.config, model.config.get_text_config(), getattr(model.config, "vision_config", None)):
        if part is not None:
            part.dtype = dtype
    return model, tokenizer


def _check_layout(model: Any, folder: Path) -> None:
    """Refuses to quantise weights that are not in the folder by their names, into which adapters could be merged."""
    head = model.get_output_embeddings()
    linears = {f"{name}.weight" for name, each in model.named_modules() if type(each) is nn.Linear and each is not head}
    stored = set() if find_gguf(folder) is not None else {each.name for each in stored_tensors(folder)}
    if getattr(model, "_weight_conversions", None) or not linears <= stored:
        raise ModelError(
            f"model.quantization: the files of {folder} hold other tensors than {type(model).__name__} computes with, "
            "so that adapters could not be merged into them; remove this key, or give a folder with *.safetensors "
            "of another architecture"
        )


def read_tokenizer_and_context(path: Path, trust: bool) -> tuple[Any, int | None]:
    """Loads the tokenizer of a model's folder or GGUF file, and the longest sequence that its configuration states.

    Raises:
        ModelError: either cannot be read.
    """
    place, options = _check_source(path, trust)
    options["trust_remote_code"] = trust
    with silence_transformers():
        config = _read_config(path, place, options)
        tokenizer = _read_or_model_error(lambda: read_tokenizer(place, options), path, "the tokenizer")
        stops: Any = config.get_text_config().eos_token_id
        if (place / "generation_config.json").is_file():
            stops = GenerationConfig.from_pretrained(place).eos_token_id
    tokenizer.stop_ids = frozenset([*_as_ids(stops), *_as_ids(tokenizer.eos_token_id)])
    return tokenizer, getattr(config.get_text_config(), "max_position_embeddings", None)


def read_tokenizer(folder: Path, options: dict[str, Any]) -> Any:
    """Loads a tokenizer by AutoTokenizer, but a generic tokenizer.json unchanged.

    For some architectures (such as qwen2) AutoTokenizer replaces a generic tokenizer by the architecture's usual one.
    """
    settings = folder / "tokenizer_config.json"
    name = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") if settings.is_file() else None
    generic = name in ("PreTrainedTokenizerFast", "TokenizersBackend") and (folder / "tokenizer.json").is_file()
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(folder, **options)


def _check_source(path: Path, trust: bool) -> tuple[Path, dict[str, Any]]:
    """Returns the arguments of `from_pretrained`, once the files that it needs are there."""
    if find_gguf(path) is None:
        _check_files(path, trust)
    return pretrained_source(path)


def _check_files(folder: Path, trust: bool) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        advice = "give the folder of a checkpoint or a GGUF file on this machine, or `new`"
        raise ModelError(f"model.path: {folder} {what}; {advice}")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"model.path: {folder} holds an adapter; merge it into its base model and give that folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: {folder} has no config.json; give a folder in Hugging Face format")
    if not _any_file(folder, _WEIGHTS):
        raise ModelError(f"model.path: {folder} has no weights (*.safetensors); the download or copy is incomplete")
    if not trust and not _any_file(folder, _VOCABULARIES):
        raise ModelError(
            f"model.path: {folder} has no tokenizer (tokenizer.json); copy the tokenizer files of its base model there"
        )


def _read_config(path: Path, place: Path, options: dict[str, Any]) -> Any:
    what = "its configuration" if "gguf_file" in options else "config.json"
    return _read_or_model_error(lambda: AutoConfig.from_pretrained(place, **options), path, what)


def _any_file(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _check_config(config: Any, folder: Path, pictures: bool = False) -> bool:
    """Refuses what cannot be trained; True for a vision-language model, which only `pictures` accepts."""
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"model.path: {folder} is quantised, which cannot be trained; give the unquantised checkpoint")
    architectures = config.architectures or []
    if pictures and config.model_type in VISION_MODELS:
        return True
    if config.model_type in VISION_MODELS:
        raise ModelError(
            f"model.path: {folder} is {', '.join(architectures)}, which sees pictures; only the policy of "
            "`rollmill run` may, so choose a causal language model (...ForCausalLM) here"
        )
    causal = any("ForCausalLM" in name or "LMHeadModel" in name for name in architectures)
    if getattr(config, "vision_config", None) is not None and not causal:
        raise ModelError(
            f"model.path: {folder} is {', '.join(architectures) or config.model_type}, which sees pictures; of those "
            f"models, rollmill trains {', '.join(sorted(VISION_MODELS))}, or give the folder of a text model"
        )
    if architectures and not causal:
        found = ", ".join(architectures)
        raise ModelError(f"model.path: {folder} is {found}, not a causal language model (...ForCausalLM)")
    return False


def _remove_dropout(config: Any, folder: Path) -> None:
    """Sets dropout to 0: it would make the trainer's probabilities differ from those the tokens were sampled with."""
    names = [
        name
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, int | float) and value > 0
    ]
    for name in names:
        setattr(config, name, 0.0)
    if names:
        log.warning("%s: set %s to 0; reinforcement learning needs a model without dropout", folder, ", ".join(names))


def _check_weights(model: PreTrainedModel, info: dict[str, Any], folder: Path) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"model.path: {folder} lacks {len(missing)} weights of {type(model).__name__} ({_shorten_names(missing)}); "
            "the checkpoint is incomplete or belongs to another architecture"
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        log.warning(
            "%s: %s does not use %d weights of the checkpoint (%s)",
            folder,
            type(model).__name__,
            len(unexpected),
            _shorten_names(unexpected),
        )
    if not text_model(model)._supports_attention_backend and not recurrent_layers(model):
        raise ModelError(
            f"model.path: {type(model).__name__} does not use transformers' attention interface, through which "
            "rollmill rolls out and trains; choose another architecture, for example Qwen, Llama, Mistral or Gemma"
        )


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(
            f"model.path: {folder}: the tokenizer has ids up to {largest}, but the model has embeddings for {rows} "
            "tokens; use the tokenizer the model was trained with, or resize the embeddings"
        )


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str) -> frozenset[int]:
    generation: Any = model.generation_config
    ids = frozenset(
        [
            *_as_ids(generation.eos_token_id),
            *_as_ids(getattr(model.config, "eos_token_id", None)),
            *_as_ids(tokenizer.eos_token_id),
        ]
    )
    if not ids:
        raise ModelError(
            f"{where} names no end-of-sequence token, so no completion could end; set eos_token_id in "
            "generation_config.json or eos_token in tokenizer_config.json"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        raise ModelError(f"{where}: the end-of-sequence id {max(ids)} is beyond the model's {rows} tokens; correct it")
    return ids


def _settle_generation(model: PreTrainedModel, eos_ids: frozenset[int], pad_id: int, where: str) -> None:
    """Makes generation settings consistent and valid.

    Other programs' `generate` then ends at the same tokens. Invalid settings, which some published checkpoints have,
    could not be saved with a checkpoint.
    """
    generation: Any = model.generation_config
    generation.eos_token_id, generation.pad_token_id = sorted(eos_ids), pad_id
    generation._from_model_config = False
    if not generation.do_sample and any(getattr(generation, name) is not None for name in _SAMPLING):
        generation.do_sample = True
        log.warning("%s: set do_sample in generation_config.json, whose sampling settings need it", where)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise ModelError(f"{where}: generation_config.json is not valid; correct or remove it: {error}") from error


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _context(model: PreTrainedModel, where: str) -> int:
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context is None and recurrent_layers(model):
        return _UNLIMITED
    if context is None:
        raise ModelError(f"{where}: config.json has no max_position_embeddings, the longest sequence; add it")
    short = _short_context(getattr(config, "rope_parameters", None) or {})
    if short is not None and short < context:
        log.warning(
            "%s: the context is cut from %d to %d tokens; beyond that, the model's position frequencies (longrope) "
            "would depend on the other sequences of a batch",
            where,
            context,
            short,
        )
        return short
    return int(context)


def _short_context(rope: dict[str, Any]) -> int | None:
    """Longest sequence for which a longrope model's frequencies are the same for all sequences; None: any.

    (The frequencies of `dynamic` models change only past max_position_embeddings, which is the context anyway.)
    """
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict) and each.get("rope_type") == "longrope"]
    limits = [int(each["original_max_position_embeddings"]) for each in kinds]
    return min(limits, default=None)


def _shorten_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _read_or_model_error(read: Callable[[], Any], folder: Path, what: str) -> Any:
    try:
        return read()
    except Exception as error:  # transformers, tokenizers and safetensors each raise errors of their own
        advice = " (model.trust_remote_code: true runs code of the folder)" if "trust_remote_code" in str(error) else ""
        raise ModelError(
            f"model.path: {folder}: {what} cannot be read: {describe_read_error(error)}{advice}"
        ) from error
