"""Model output made safe for a terminal."""

from __future__ import annotations

import re

# Control characters (a completion may hold terminal escape codes), text-direction overrides and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal spelled out, such as `\\x1b`. Line breaks and tabs stay."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: str, width: int) -> str:
    """`text` on one line, line breaks shown as `\\n`, cut to `width` characters."""
    flat = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return flat if len(flat) <= width else flat[: max(0, width - 3)] + "..."
