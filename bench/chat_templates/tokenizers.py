"""Small tokenizers which stand in for those of the checkpoints: real markers and turn ends, few merges.

All share one byte-level BPE, with the split of Llama 3, trained on a page of prose and JSON: punctuation merges with
line breaks and quotes, so that text on both sides of a boundary can share a token, as in the checkpoints. Families of
SentencePiece (Gemma, Llama 2, Mistral before Tekken) differ in how they encode spaces, which is not rebuilt.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.chat_templates.corpus import ChatTemplate
from bench.chat_templates.families import added_tokens, family

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PROSE = """
You are a helpful assistant. Use the tools for what you do not know. What is the weather in Paris today, and how warm
will it be tomorrow? It is 21 degrees, with a little rain in the evening. How much are two and three? It is five.
Let me think about this: first the user asks for the weather in two cities, so I should call the function twice.

# Tools

You may call one or more functions to assist with the user query. The functions are between the tags <tools></tools>:
<tools>
{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": {}}}
</tools>
For each function call, return a json object with function name and arguments within <tool_call></tool_call> tags:
<tool_call>
{"name": "function", "arguments": {"city": "Paris", "days": 3, "exact": true, "unit": null}}
</tool_call>
<think>
The user wants a number. There is no tool for that.
</think>

The answer is **42**.
"""


@cache
def _base() -> str:
    """The shared BPE, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": []}
    tokenizer.train_from_iterator([*[_PROSE] * 4, json.dumps(schema), json.dumps(schema, indent=2)], trainer)
    found: str = tokenizer.to_str()
    return found


def stand_in(template: ChatTemplate) -> tuple[PreTrainedTokenizerFast, frozenset[int]]:
    """A new tokenizer with the template, and the ids of `eos_token_id` in the checkpoint's generation config."""
    own = family(template.name)
    special, plain = added_tokens(own, template.text)
    backend = Tokenizer.from_str(_base())
    marks = [(text, True) for text in special] + [(text, False) for text in plain]
    for text, is_special in sorted(marks):
        token = AddedToken(text, special=is_special, normalized=False)
        if is_special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=own.bos, eos_token=own.eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template.text
    return tokenizer, frozenset(token_id(tokenizer, end) for end in own.ends)


def token_id(tokenizer: Any, text: str) -> int:
    """Id of one token of the vocabulary. Raises KeyError."""
    found: int = tokenizer.get_vocab()[text]
    return found
