"""Tokenizers trained on the taskset's own text, for models made from scratch.

Neither kind normalises text, adds a beginning-of-sequence token or puts a space in front: decoding gives back exactly
the characters that were encoded.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollmill.config.model import TokenizerConfig

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] + ':\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif -%}
{{ '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif -%}"""
"""Roles as plain text; an assistant's turn ends with the end-of-sequence token."""

_CHAT_TEXT = "system: user: assistant:\n"


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer for `texts`; the same texts give the same tokenizer.

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
