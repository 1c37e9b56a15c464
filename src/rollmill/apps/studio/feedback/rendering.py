"""Rendering of completions for people: invisible and direction-changing characters are made visible."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from rollmill.apps.studio.feedback.requests import FeedbackKind
from rollmill.apps.studio.feedback.service import FeedbackRecord
from rollmill.apps.studio.report.pictures import Thumbnail, draw_thumbnails
from rollmill.data.picture_turns import picture_places
from rollmill.types import Experience

MAX_SHOWN_CHARS = 200_000
"""Maximum characters of a text on a page."""
_ODD = re.compile(
    "([\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e0fff]+)"
)
"""Control characters, text direction marks and zero-width characters, except joiners of scripts and emoji (200c,
200d)."""


def escape_text(text: str) -> Markup:
    """Escapes text for a page: markup is escaped, invisible and direction-changing characters are spelled out and
    marked, and very long texts are truncated."""
    shown = Markup(
        ""
    ).join(
        _spelled(piece) if number % 2 else piece  # every second piece is odd
        for number, piece in enumerate(_ODD.split(text[:MAX_SHOWN_CHARS]))
    )
    more = len(text) - MAX_SHOWN_CHARS
    return shown + Markup('<span class="odd">and {} characters more</span>').format(more) if more > 0 else shown


def _spelled(characters: str) -> Markup:
    return Markup('<span class="odd">{}</span>').format(characters.encode("unicode_escape").decode("ascii"))


@dataclass(frozen=True, slots=True)
class CompletionCard:
    """A completion and the feedback on it."""

    place: str  #: its anchor on the page
    experience: Experience
    tokens: int
    versions: str  #: weight versions of its tokens
    level: str  #: the reward as 0 to 10, for its colour; empty without a reward
    outcomes: dict[str, str]
    mine: float | None  #: the author's rating
    acts: list[FeedbackRecord]  #: feedback on this completion, oldest first, without undone records
    seen: list[Thumbnail]  #: pictures of the prompt and of later turns

    @property
    def pictures(self) -> list[Thumbnail]:
        """The pictures of the prompt."""
        return [each for each in self.seen if not each.turn]

    @property
    def marked(self) -> list[Thumbnail]:
        """The pictures in which the answer names places, and those of later turns."""
        return [each for each in self.seen if each.boxes or each.turn]

    @property
    def parts(self) -> list[tuple[str, float | None, str]]:
        """Name, number and outcome of every part of the reward."""
        names = dict.fromkeys([*self.experience.reward_parts, *self.outcomes])
        return [(name, self.experience.reward_parts.get(name), self.outcomes.get(name, "")) for name in names]


def cards(experiences: Sequence[Experience], acts: Sequence[FeedbackRecord], author: str) -> list[CompletionCard]:
    """Returns the cards of a group's completions."""
    return [_card(number, one, acts, author) for number, one in enumerate(experiences, start=1)]


def _card(number: int, experience: Experience, acts: Sequence[FeedbackRecord], author: str) -> CompletionCard:
    own = experience.info.get("boxes") or any(picture_places(experience))
    pictures = draw_thumbnails(experience) if number == 1 or own else []
    about = [act for act in acts if experience.id in act.of and act.undone_by is None]
    mine = [act.rating for act in about if act.kind == FeedbackKind.RATE and act.author == author]
    outcomes = experience.info.get("outcomes")
    return CompletionCard(
        f"c{number}",
        experience,
        experience.action_tokens,
        _versions(experience),
        _level(experience.reward),
        {str(name): str(outcome) for name, outcome in outcomes.items()} if isinstance(outcomes, dict) else {},
        mine[-1] if mine else None,
        about,
        pictures,
    )


def _versions(experience: Experience) -> str:
    made = experience.versions[experience.action_mask]
    if not made.size:
        return "-"
    return f"{made.min()}" if made.min() == made.max() else f"{made.min()} to {made.max()}"


def _level(reward: float | None) -> str:
    return "" if reward is None or not np.isfinite(reward) else str(round(10 * min(1.0, max(0.0, reward))))
