"""Tokens of a completion for people: their texts, and levels for their colours."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rollmill.types import Experience

Decoder = Callable[[Sequence[int]], str]
_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, so byte-level tokens per character


def tokenizer_file(run_dir: Path) -> Path | None:
    """The `tokenizer.json` of a run, or of its newest checkpoint; None if there is neither."""
    if (own := run_dir / "tokenizer" / "tokenizer.json").is_file():
        return own
    found = []
    for path in (run_dir / "checkpoints").glob("step-*/tokenizer.json"):
        match = re.fullmatch(r"step-(\d+)", path.parent.name)
        if match:
            found.append((int(match[1]), path))
    return max(found)[1] if found else None


def load_decoder(run_dir: Path) -> Decoder | None:
    """Load the decoder of a run; None if it stores no `tokenizer.json`."""
    path = tokenizer_file(run_dir)
    if path is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_texts(experience: Experience, decode: Decoder | None) -> list[str]:
    """Text of each token, [T]; without a decoder, the id in angle brackets.

    A token with only part of a character has an empty text; the one that completes it has the character.
    """
    ids = [int(token) for token in experience.token_ids]
    if decode is None:
        return [f"<{token}>" for token in ids]
    texts, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:read]), decode(ids[start:end])
        if now.endswith("\ufffd") and end - read < _LONGEST_CHARACTER and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, read = read, end
    return texts


def advantage_levels(experience: Experience, levels: int = 4) -> list[int]:
    """Each token's advantage as -levels..levels, relative to the largest of the experience or 1; 0 outside the mask."""
    if experience.advantage is None:
        return [0] * len(experience.token_ids)
    values = np.nan_to_num(np.where(experience.action_mask, experience.advantage, 0.0))
    scaled = values / max(1.0, float(np.abs(values).max(initial=0.0)))
    return (np.sign(scaled) * np.ceil(np.abs(scaled) * levels - 1e-6)).astype(int).tolist()  # type: ignore[no-any-return]


def surprise_levels(experience: Experience, levels: int = 6) -> list[int]:
    """Each token's surprise as 0..levels: bits (minus log2 of its probability), rounded; 0 outside the mask."""
    bits = np.where(experience.action_mask, -experience.logprobs / np.log(2.0), 0.0)
    return np.clip(np.round(np.nan_to_num(bits, posinf=levels)), 0, levels).astype(int).tolist()  # type: ignore[no-any-return]
