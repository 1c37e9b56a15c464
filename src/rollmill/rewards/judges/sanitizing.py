"""Texts of others inside a question to the judge: set off by markers that they cannot contain.

A marker ends in a hash of the text that it encloses. So a policy cannot know it, the same text has the same marker (and
the same place in a cache), and it is checked not to occur in the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import regex

_INVISIBLE = regex.compile(r"[[\p{Cf}\p{Cc}\p{Co}\p{Default_Ignorable_Code_Point}]--[\n\t]]", regex.V1)
_QUOTE = r"[\p{Quotation_Mark}`´]"
_JSON = regex.compile(
    rf"[\\＼]u[0-9a-f]{{4}}|[{{｛﹛]\s*+{_QUOTE}|{_QUOTE}\s*+\w++\s*+{_QUOTE}\s*+[:：﹕]", regex.IGNORECASE
)
"""An escaped letter, the beginning of an object or a key, whatever its alphabet."""
_KINDS = "question|reference|rubric|response"
_LOOKALIKE = regex.compile(
    rf"[<＜﹤](?=\s*+(?:[/／]\s*+)?+(?:{_KINDS})\b)"  # our markers
    r"|[<＜﹤](?=[|｜])|<(?=/?(?:s|bos|eos|pad|unk|think|start_of_turn|end_of_turn)>)|<(?=<SYS>)|\[(?=/?INST\])",
    regex.IGNORECASE,
)
"""What could pass for a marker, or for a token that ends a turn of a chat."""


def sanitize_text(text: str) -> str:
    """The text as a judge sees it: no invisible characters or lone surrogates, and look-alikes begin otherwise."""
    text = text.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _LOOKALIKE.sub("‹", _INVISIBLE.sub("", text))


def wrap_in_markers(kind: str, text: str) -> str:
    """A cleaned text between markers such as <response-1a2b3c> and </response-1a2b3c>."""
    marker = f"{kind}-{_unused(kind, [text])}"
    return f"<{marker}>\n{text}\n</{marker}>"


def unused_json_key(word: str, texts: Iterable[str]) -> str:
    """A key for the verdict's JSON that no echo of the texts can hold: `word`, or where one of them may, word_hash.

    A text may hold it in quotes of any kind, or in disguise: with escapes such as \\u0063, or with letters of another
    alphabet, which a judge that repeats the text may write plainly.
    """
    texts = list(texts)
    quoted = regex.compile(rf"(?:{_QUOTE}|[{{｛﹛])\s*+{word}", regex.IGNORECASE)
    if not any(quoted.search(text) or _JSON.search(text) for text in texts):
        return word
    return f"{word}_{_unused(word, texts)}"


def _unused(salt: str, texts: list[str]) -> str:
    """Six hexadecimal digits that stand in none of the texts."""
    number = 0
    while True:
        hashed = hashlib.sha256("\0".join([salt, str(number), *texts]).encode()).hexdigest()[:6]
        if not any(hashed in text for text in texts):
            return hashed
        number += 1
