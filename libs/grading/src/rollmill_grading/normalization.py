"""Text normalisation: half width, circled digits, unit signs, no bold; and keys for comparing texts.

Every reward that compares texts reads them in half width, so `１２元` is `12元` and `Ｂ` is `B`.
"""

from __future__ import annotations

import re

_CIRCLED = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳"
_SIGNS: dict[int, int | str] = {
    **{0xFF01 + index: 0x21 + index for index in range(94)},
    **{ord(sign): "" for sign in "\u200b\u200c\u200d\u2060\ufeff"},
    **{ord(sign): " " for sign in "\u3000\u00a0"},
    **{ord(sign): f"({index})" for index, sign in enumerate("⑴⑵⑶⑷⑸⑹⑺⑻⑼⑽", 1)},
    **{ord("㎜"): "mm", ord("㎝"): "cm", ord("㎞"): "km", ord("㎡"): "m²", ord("㎎"): "mg", ord("㎏"): "kg"},
    **{
        ord("℃"): "°C",
        ord("℉"): "°F",
        ord("Ω"): "Ω",
        ord("−"): "-",
        ord("﹣"): "-",
        ord("￥"): "¥",
        ord("【"): "[",
        ord("】"): "]",
    },
}
_TEXTCIRCLED = re.compile(r"\\textcircled\s*(?:\{\s*(\d{1,2})\s*\}|\{\s*\\small\s*\{?(\d)\}?\s*\}|(\d))")
_BOLD = re.compile(r"\*\*(?!\w)|(?<!\w)\*\*|__(?!\w)|(?<!\w)__")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
_ARTICLE = re.compile(r"(?:the|an?)\s+(?=\w{2})", re.IGNORECASE)
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_OUTER = " \t\r\n.,;:。、·\"'“”‘’《》「」『』【】$`*"

CJK = "\u4e00-\u9fff"
"""Chinese characters, for character classes of regular expressions."""
_HAS_CJK = re.compile(f"[{CJK}]")


def to_half_width(text: str) -> str:
    """Replace full-width letters, digits and signs by ASCII, and remove invisible characters."""
    return text if text.isascii() else text.translate(_SIGNS)


def fold_text(text: str) -> str:
    """Convert the text to half width without bold marks; a circled digit becomes one character."""
    text = _TEXTCIRCLED.sub(lambda found: circled_digit(int(found[1] or found[2] or found[3])), to_half_width(text))
    return _BOLD.sub("", text)


def circled_digit(number: int) -> str:
    """Return `③` for 3; brackets from 21 on."""
    return _CIRCLED[number - 1] if 1 <= number <= len(_CIRCLED) else f"({number})"


def parse_circled_digit(sign: str) -> int | None:
    """Return 3 for `③`; None for anything else."""
    return _CIRCLED.index(sign) + 1 if len(sign) == 1 and sign in _CIRCLED else None


def comparison_key(text: str) -> str:
    """Return a key that is equal for equal texts: without outer punctuation, spaces and, in plain words, case.

    Formulas keep their case, because R and r differ. `H₂O` is `H2O`.
    """
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", fold_text(text)).strip(_OUTER)
    text = re.sub(r"_\{?(\w)\}?", r"\1", text.translate(_LOWERED))
    text = _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", re.sub(r"\s+", " ", text))
    plain = _WORDS.fullmatch(text) is not None and re.search(r"[^\W\d_]{3}", text) is not None
    return text.casefold() if plain else text


def has_cjk(text: str) -> bool:
    """True if it has Chinese characters, which do not occur in formulas."""
    return _HAS_CJK.search(text) is not None
