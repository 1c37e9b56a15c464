"""What a text says in words where nothing marks its answer: `The process is called **mitosis**.` names mitosis."""

from __future__ import annotations

import re

from rollmill.rewards.answers.phrase import strip_markup

_LONGEST = 600
_BOLD = re.compile(r"\*\*([^*\n]{1,80}?)\*\*")
_YES = re.compile(r"[\s*]*(yes|no)\b[*]*(?=[,.;:!]|\s*$)", re.IGNORECASE)
_BETWEEN = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n")
_PREDICATE = re.compile(
    r"[^,;:]{0,200}?\b(?:is|are|was|were|will be)\b(?: (?:called|named|known as|actually|therefore|clearly))?\s+"
    r"(?P<said>[^,;:.!?]{1,80})"
)
_IN_CHINESE = re.compile(r"[^是，,。;；]{1,80}(?:应该)?(?<![不还就])是(?P<said>[^是，,。；;.]{1,30})[。.\s]*")
_CUT = re.compile(
    r"\s+(?:and|but|because|since|which|who|while|with|where|as|in the (?:image|picture|photo|chart|graph))\b.*",
    re.DOTALL | re.IGNORECASE,
)
_DOING = re.compile(r"[a-z]+ing (?:(?:an?|the) )?(?P<what>[a-z]+)", re.IGNORECASE)
_UNSURE = re.compile(
    r"\b(?:not|never|neither|nor|no|or|if|maybe|perhaps|probably|might|may|could|would|either|wrong|incorrect|wait"
    r"|actually|instead|but|however|is|are|was|were)\b|n't\b|[不非没错或否若]|可能|也许|如果|但",
    re.IGNORECASE,
)
_DOUBTED = re.compile(r"\b(?:or|but|maybe|perhaps|might|could|may|wait|actually|also|possibly)\b", re.IGNORECASE)
_TURNED = re.compile(r"\b(?:yes|wait|actually|but|however|sorry|correct\w*)\b", re.IGNORECASE)
_REFERS_BACK = re.compile(r"\s*(?:it|its|he|she|they|this|these|that)\b|\s*[它他她这其]", re.IGNORECASE)
_CONCLUDES = re.compile(r"\s*(?:so|thus|hence|therefore|所以|因此|故)\b", re.IGNORECASE)


def extract_statements(text: str) -> list[str]:
    """The readings of a short text without a marked answer: of `Yes, there is one` "Yes"; of `The car is red` "red".

    They are a leading yes or no, else the bold words, else what the only sentence says that something is. A sentence
    that denies, doubts or offers several says nothing.
    """
    text = text.strip()
    if not text or len(text) > _LONGEST or text.endswith(("?", "？")):
        return []
    leading = _YES.match(text)
    if leading is not None:
        return [] if _TURNED.search(text, leading.end()) else [leading[1]]
    sentences = [each.strip() for each in _BETWEEN.split(text) if each.strip(" *")]
    if not sentences:
        return []
    if "**" in text:
        return _bold(sentences[-1])
    rest = sentences[1:]
    if rest and not all(_REFERS_BACK.match(each) for each in rest):
        if not _CONCLUDES.match(sentences[-1]):
            return []
        return _predicate(sentences[-1])
    return _predicate(sentences[0])


def _bold(sentence: str) -> list[str]:
    """The only bold words of the last sentence, unless it denies them or goes on to others."""
    found = list(_BOLD.finditer(sentence))
    if len(found) != 1 or found[0][1].rstrip().endswith(":"):
        return []
    others = sentence[: found[0].start()] + sentence[found[0].end() :]
    plain = re.sub(r"\b(?:is|are|was|were)\b", "", others)
    return [] if _UNSURE.search(plain) else [strip_markup(found[0][1])]


def _predicate(sentence: str) -> list[str]:
    """What a sentence says that its subject is, with and without what is done: `playing tennis` and `tennis`."""
    found = _PREDICATE.match(sentence) or _IN_CHINESE.fullmatch(sentence)
    if found is None:
        return []
    said = _CUT.sub("", found["said"]).strip()
    subject = sentence[: found.start("said")]
    plain = re.sub(r"\b(?:is|are|was|were|actually)\b", "", subject)
    if not said or _UNSURE.search(said) or _UNSURE.search(plain) or _DOUBTED.search(sentence, found.end("said")):
        return []
    doing = _DOING.fullmatch(said)
    return [strip_markup(said), *([doing["what"]] if doing else [])]
