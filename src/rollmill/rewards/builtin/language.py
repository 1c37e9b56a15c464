"""The language reward: the share of words in the target language (DeepSeek-R1, arXiv:2501.12948, 2.3.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.errors import ConfigError
from rollmill.rewards.base import Score, TextReward
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    import regex

    from rollmill.rewards.resources import RewardResources

# Languages and their scripts.

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
"""Language code (ISO 639) -> scripts."""
_LATIN_CODES = (
    "af az bs ca cs cy da de en eo es et eu fi fil fo fr ga gl ha hr hu id ig is it jv ku la lb lt lv mg mi ms mt nb "
    "nl nn no pl pt qu rm ro rw sk sl sm sn so sq su sv sw tk tl tr uz vi xh yo zu"
)
LATIN = _LATIN_CODES.split()
"""Languages written in Latin letters."""


def check_language(language: str) -> None:
    """Raise ConfigError for an unknown language code."""
    if language not in LATIN and language not in SCRIPTS:
        known = ", ".join(sorted([*LATIN, *SCRIPTS]))
        raise ConfigError(f"reward language: `{language}` is not the code of a language; there are {known}")


def scripts_of(language: str) -> tuple[str, ...]:
    """Return the scripts of a language."""
    return SCRIPTS.get(language, ("Latin",))


def script_words(text: str, scripts: Sequence[str]) -> tuple[list[str], int]:
    """Return the words of these scripts, and the number of words of other scripts.

    A word is a run of letters of these scripts, or of others. Single Latin and Greek letters are variable names, not
    words.
    """
    words, others = [], 0
    for found in _pattern(tuple(scripts)).finditer(text):
        if found[1] is not None:
            words.append(found[1])
        else:
            others += 1
    return words, others


def main_scripts(text: str) -> tuple[str, ...]:
    """Return the scripts of most words of a text: the Japanese ones if there are kana, Latin if there are no words."""
    counts = {scripts: len(script_words(text, scripts)[0]) for scripts in set(SCRIPTS.values()) | {("Latin",)}}
    del counts["Cyrillic", "Latin"]
    if not any(len(script_words(text, (kana,))[0]) for kana in ("Hiragana", "Katakana")):
        del counts["Han", "Hiragana", "Katakana"]
    return max(counts, key=lambda scripts: (counts[scripts], len(scripts), scripts == ("Latin",)))


@cache
def _pattern(scripts: tuple[str, ...]) -> regex.Pattern[str]:
    import regex

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


_WINDOW = 16
"""Words whose language is detected together."""
_PAIRS = (("```", "```"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
"""Delimiters of code and formulas."""
_MARKUP = re.compile(r"</?[A-Za-z][\w.-]{0,40}>|\\[A-Za-z]+|https?://[!-~]+")
_ASCII = re.compile(r"[\x00-\x7f]+")
_CANDIDATE_CODES = "ar bg cs da de el en es fa fi fr he hi hu id it ja ko ms nl no pl pt ro ru sv th tr uk ur vi zh"
_CANDIDATES = _CANDIDATE_CODES.split()
"""Candidates for a text's language, besides the target one: short texts resemble many rare languages."""
_PROMPT = 4000
"""Characters of a prompt that determine its language."""
TargetLanguage = tuple[str | None, tuple[str, ...]]
"""A language (None if scripts alone decide) and its scripts."""


class LanguageReward(TextReward):
    """Fraction of words in the target language (DeepSeek-R1), in the whole text: reasoning counts. Code, formulas and
    tags are ignored."""

    largest = 1.0
    name: Literal["language"]
    language: str = Field("prompt", pattern=r"^(prompt|[a-z]{2,3})$")
    """ISO 639 code, for example `en` or `zh`; `prompt` is the language of the task's prompt."""
    method: Literal["script", "identify"] = "script"
    """`script` checks the alphabet of each word, which distinguishes English from Chinese but not from French.
    `identify` also detects the language of every 16 words of one alphabet (extra `language`)."""

    def extras(self) -> dict[str, tuple[str, str]]:
        return {"method": ("language", "py3langid")} if self.method == "identify" else {}

    def setup(self, resources: RewardResources) -> None:
        if self.language != "prompt":
            check_language(self.language)
        if self.method == "identify":
            detect_language("", "en" if self.language == "prompt" else self.language)  # loads the model, or fails

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return words in the target language / all words.

        Outcomes besides ok: `no_answer`, `no_words`, `too_long`; they earn 0.
        """
        import asyncio

        text = self.select_text(completion.text)
        if text is None:
            return Score(0.0, "no_answer")
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        language, scripts = await self._target(task)
        words, others = await run_large_in_thread(len(text), _words_of, text, scripts)
        if not words:
            return Score(0.0, "ok" if others else "no_words")
        matching = len(words) if language is None else await asyncio.to_thread(_matching, words, language)
        return Score(matching / (len(words) + others))

    async def _target(self, task: Task) -> TargetLanguage:
        import asyncio

        language, identify = self.language, self.method == "identify"
        if language == "prompt":
            return await asyncio.to_thread(_of_prompt, prompt_text(task), identify)
        return (language if identify else None), scripts_of(language)


@lru_cache(256)
def _of_prompt(prompt: str, identify: bool) -> TargetLanguage:
    start = extract_prose(prompt)[:_PROMPT]
    scripts = main_scripts(start)
    language = detect_language(start) if identify else None
    return (language if language is not None and scripts[0] in scripts_of(language) else None), scripts


def _words_of(text: str, scripts: tuple[str, ...]) -> tuple[list[str], int]:
    return script_words(extract_prose(text), scripts)


def prompt_text(task: Task) -> str:
    """Return the prompt as text; of a chat the last message."""
    return task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]


def extract_prose(text: str) -> str:
    """Return the text without code, formulas, tags and addresses.

    Only their ASCII characters are removed: a comment in another script is still text in that script.
    """
    for opening, closing in _PAIRS:
        text = _emptied(text, opening, closing)
    return _MARKUP.sub(" ", text)


def _emptied(text: str, opening: str, closing: str) -> str:
    parts, position = [], 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        end += len(closing)
        one_line = len(opening) == 1
        inside = text[start:end]
        if one_line and "\n" in inside:
            parts.append(text[position:start])
            position = end - len(closing)
            parts.append(text[start:position])
            continue
        parts += [text[position:start], " ", _ASCII.sub(" ", inside)]
        position = end
    return "".join([*parts, text[position:]])


def _matching(words: list[str], language: str) -> int:
    """Count the words in windows that are in the language."""
    count = max(len(words) // _WINDOW, 1)
    edges = [len(words) * index // count for index in range(count + 1)]
    joint = "" if scripts_of(language)[0] in UNSPACED else " "
    windows = [words[start:end] for start, end in pairwise(edges)]
    return sum(len(window) for window in windows if detect_language(joint.join(window), language) == language)


def detect_language(text: str, target: str = "en") -> str:
    """Return the most probable language among the common ones and the target one (py3langid).

    Raises ConfigError if py3langid is missing or does not know the language.
    """
    return str(_identifier("" if target in _CANDIDATES else target).classify(text)[0])


@cache
def _identifier(rare: str) -> Any:
    """Build the identifier for the common languages and a rare one."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError as error:
        raise ConfigError("method `identify` needs py3langid: pip install 'rollmill[language]'") from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    try:
        identifier.set_languages([*_CANDIDATES, rare] if rare else _CANDIDATES)
    except ValueError as error:
        raise ConfigError(f"py3langid does not know the language `{rare}`; use method: script") from error
    return identifier
