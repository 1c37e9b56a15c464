"""Text to tokens, piece by piece: no token crosses from one piece into the next, and no text is added at a join."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)
_warned = set[str]()


def encode_pieces(tokenizer: Any, pieces: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    """Tokenize the pieces of a text. The first one has the tokens that it has alone, as in a rollout's prompt.

    The text is encoded as a whole and split by its tokens' places: tokenizers that put a space before a text
    (Llama 2's) would put one before each piece. Where a token would span two pieces, they are encoded apart.

    Args:
        add_special_tokens: the first piece begins with the tokens that the tokenizer puts before a text (BOS).
    """
    first = encode_start(tokenizer, pieces[0]) if add_special_tokens else _encode(tokenizer, pieces[0])
    found = _split_by_offsets(tokenizer, pieces, first, add_special_tokens)
    return found or [first, *(_encode(tokenizer, each) for each in pieces[1:])]


def encode_start(tokenizer: Any, text: str) -> list[int]:
    """Tokenize the start of a text that the policy continues: with BOS where the tokenizer has one, without EOS.

    A text that begins with BOS itself gets no second one.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos] and _encode(tokenizer, text)[:2] != [bos, bos]:
        if "bos" not in _warned:
            _warned.add("bos")
            log.warning(
                "prompts begin with the text %s, which the tokenizer adds; it is added once", tokenizer.bos_token
            )
        ids = ids[1:]
    if ids[-1:] == [eos] and _encode(tokenizer, text)[-1:] != ids[-1:]:
        return ids[:-1]  # a tokenizer that appends EOS: the completion has to continue the prompt
    return ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _split_by_offsets(
    tokenizer: Any, pieces: Sequence[str], first: list[int], add_special_tokens: bool
) -> list[list[int]] | None:
    """The tokens of each piece; None if one spans two pieces, none has a place, or the first piece has others alone."""
    text = "".join(pieces)
    if len(pieces) == 1 or not getattr(tokenizer, "is_fast", False):
        return None
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = found["input_ids"], found["offset_mapping"]
    ends, at, split = list[int](), 0, list[list[int]]()
    for piece in pieces:
        at += len(piece)
        ends.append(at)
    start = 0
    for number, end in enumerate(ends):
        stop = start
        while stop < len(ids) and (offsets[stop][0] < end or number == len(ends) - 1):
            if offsets[stop][1] > end:
                return None
            stop += 1
        split.append(list(ids[start:stop]))
        start = stop
    alone = first[len(first) - len(split[0]) :] if add_special_tokens else first
    if split[0] != alone:
        return None
    return [first, *split[1:]]
