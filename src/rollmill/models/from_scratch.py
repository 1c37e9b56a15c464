"""Builds new models and trains their tokenizers; saves models in Hugging Face format.

Tokenizers are trained on the taskset's text. They do not normalise text, add a beginning-of-sequence token or prepend a
space: decoding returns exactly the encoded characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from rollmill.config.model import NewModelConfig, TokenizerConfig
from rollmill.files import share_files
from rollmill.models.lora import ADAPTER_FOLDER, has_lora, save_adapter
from rollmill.models.merged_checkpoint import save_gathered, save_merged
from rollmill.models.vision import picture_processor

if TYPE_CHECKING:
    from rollmill.weights.buckets import ShardedWeights

_CONFIGS: dict[str, Any] = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "gemma": GemmaConfig}


def init_model(config: NewModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Builds a randomly initialised model in fp32 on the CPU for a tokenizer.

    The weights depend on `config`, the vocabulary's size and `seed` only; torch's random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_architecture(config, tokenizer), dtype=torch.float32)
    return model


def build_new_meta_model(config: NewModelConfig) -> PreTrainedModel:
    """Builds the model on the meta device, to read its sizes. Its vocabulary has the largest size that its tokenizer
    may have; one of characters counts 256."""
    size = 256 if config.tokenizer.kind == "char" else config.tokenizer.vocab_size
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_architecture(config, _Vocabulary(size)))
    return model


class _Vocabulary:
    """The part of a tokenizer that a model's sizes depend on."""

    pad_token_id = bos_token_id = eos_token_id = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    weights: ShardedWeights | None = None,
) -> None:
    """Writes a Hugging Face directory (safetensors, generation_config.json, tokenizer).

    With LoRA the weights are the merged ones, and `adapter/` holds the adapters. A vision-language model brings its
    processor.

    transformers' AutoTokenizer replaces a generic tokenizer (one we trained) by its own for architecture qwen2; load it
    as PreTrainedTokenizerFast there.

    Args:
        weights: of a model that has none, since ranks hold parts of them.

    Raises:
        OSError: (or safetensors' own error) the directory cannot be written.
    """
    with silence_transformers():
        if has_lora(model):
            save_adapter(model, directory / ADAPTER_FOLDER)
            save_merged(model, directory)
        elif weights is not None:
            save_gathered(model, weights, directory)
        else:
            model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        processor = picture_processor(model)
        if processor is not None:
            processor.save(directory)
    share_files(directory)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppresses transformers' progress bars and logging below errors; exceptions still propagate."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


def _architecture(config: NewModelConfig, tokenizer: PreTrainedTokenizerBase | _Vocabulary) -> PreTrainedConfig:
    made: PreTrainedConfig = _CONFIGS[config.architecture](
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or 3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim or config.hidden_size // config.heads,
        max_position_embeddings=config.context,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return made


PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] + ':\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif -%}
{{ '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif -%}"""
"""Writes roles as plain text; an assistant's turn ends with the end-of-sequence token."""

_CHAT_TEXT = "system: user: assistant:\n"


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on `texts`, deterministically.

    `char` has one token per character of the texts (and of the chat template's role names); other characters become
    `<unk>`. `bpe` is byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) over single digits and words, and covers
    any text.
    """
    tokenizer = _char(texts) if config.kind == "char" else _bpe(texts, config.vocab_size)
    special = {"unk_token": UNK} if config.kind == "char" else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        **special,
    )


def _char(texts: Iterable[str]) -> Tokenizer:
    characters = set(_CHAT_TEXT)
    for text in texts:
        characters.update(text)
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *sorted(characters)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    return tokenizer


def _bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
