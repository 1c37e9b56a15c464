"""Languages and the scripts they are written in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import regex

from rollmill.errors import ConfigError

UNSPACED = ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar")
"""Scripts without spaces between words: each character counts as a word."""
SCRIPTS: dict[str, tuple[str, ...]] = {
    "am": ("Ethiopic",),
    "ar": ("Arabic",),
    "as": ("Bengali",),
    "be": ("Cyrillic",),
    "bg": ("Cyrillic",),
    "bn": ("Bengali",),
    "el": ("Greek",),
    "fa": ("Arabic",),
    "gu": ("Gujarati",),
    "he": ("Hebrew",),
    "hi": ("Devanagari",),
    "hy": ("Armenian",),
    "ja": ("Han", "Hiragana", "Katakana"),
    "ka": ("Georgian",),
    "kk": ("Cyrillic",),
    "km": ("Khmer",),
    "kn": ("Kannada",),
    "ko": ("Hangul",),
    "ky": ("Cyrillic",),
    "lo": ("Lao",),
    "mk": ("Cyrillic",),
    "ml": ("Malayalam",),
    "mn": ("Cyrillic",),
    "mr": ("Devanagari",),
    "my": ("Myanmar",),
    "ne": ("Devanagari",),
    "pa": ("Gurmukhi",),
    "ru": ("Cyrillic",),
    "sa": ("Devanagari",),
    "si": ("Sinhala",),
    "sr": ("Cyrillic", "Latin"),
    "ta": ("Tamil",),
    "te": ("Telugu",),
    "th": ("Thai",),
    "ti": ("Ethiopic",),
    "uk": ("Cyrillic",),
    "ur": ("Arabic",),
    "yi": ("Hebrew",),
    "zh": ("Han",),
}
"""By ISO 639 code."""
_LATIN_CODES = (
    "af az bs ca cs cy da de en eo es et eu fi fil fo fr ga gl ha hr hu id ig is it jv ku la lb lt lv mg mi ms mt nb "
    "nl nn no pl pt qu rm ro rw sk sl sm sn so sq su sv sw tk tl tr uz vi xh yo zu"
)
LATIN = _LATIN_CODES.split()
"""Languages that are written in Latin letters."""


def check_language(language: str) -> None:
    """Raises ConfigError for a code that is not known."""
    if language not in LATIN and language not in SCRIPTS:
        known = ", ".join(sorted([*LATIN, *SCRIPTS]))
        raise ConfigError(f"reward language: `{language}` is not the code of a language; there are {known}")


def scripts_of(language: str) -> tuple[str, ...]:
    """The scripts of a language."""
    return SCRIPTS.get(language, ("Latin",))


def script_words(text: str, scripts: Sequence[str]) -> tuple[list[str], int]:
    """Words of these scripts, and how many words of other scripts there are.

    A word is a run of letters of these scripts, or of others. Single Latin and Greek letters are names of variables,
    and no words.
    """
    own, others = [], 0
    for found in _pattern(tuple(scripts)).finditer(text):
        if found[1] is not None:
            own.append(found[1])
        else:
            others += 1
    return own, others


def main_scripts(text: str) -> tuple[str, ...]:
    """The scripts of most words of a text: those of Japanese where there are kana. Latin where there is no word."""
    counts = {scripts: len(script_words(text, scripts)[0]) for scripts in set(SCRIPTS.values()) | {("Latin",)}}
    del counts["Cyrillic", "Latin"]
    if not any(len(script_words(text, (kana,))[0]) for kana in ("Hiragana", "Katakana")):
        del counts["Han", "Hiragana", "Katakana"]
    return max(counts, key=lambda scripts: (counts[scripts], len(scripts), scripts == ("Latin",)))


@cache
def _pattern(scripts: tuple[str, ...]) -> regex.Pattern[str]:
    spaced = _class(script for script in scripts if script not in UNSPACED)
    single = _class(script for script in scripts if script in UNSPACED)
    mine = "|".join(
        ([rf"[{single}]"] if single else [])
        + (
            [rf"(?![\p{{Latin}}\p{{Greek}}](?!\p{{L}}))[{spaced}](?:[{spaced}\p{{M}}]|['’-](?=[{spaced}]))*"]
            if spaced
            else []
        )
    )
    rest = rf"[\p{{L}}--[{_class(scripts)}{_class(UNSPACED)}]]"
    other = rf"[{_class(UNSPACED)}]|(?![\p{{Latin}}\p{{Greek}}](?!\p{{L}})){rest}(?:{rest}|\p{{M}})*"
    return regex.compile(rf"({mine})|{other}", regex.V1)


def _class(scripts: Iterable[str]) -> str:
    return "".join(rf"\p{{Script={script}}}" for script in scripts)
