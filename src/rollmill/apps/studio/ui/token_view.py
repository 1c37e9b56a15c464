"""A completion token by token, and the tree of the turns of a rollout."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.errors import RollmillError
from rollmill.trackers.rollout_log import decode_experience
from rollmill.trackers.token_texts import Decoder, load_decoder, token_texts, tokenizer_file
from rollmill.types import DRAFTED_KEY, Experience, drafted_tokens, stored_info

MOST_TOKENS = 4000
"""Tokens of one page."""
_TURN_CHARS = 20_000
_DECODERS = 4


class DecoderCache:
    """Decoders of the runs that were looked at last; loaded again when a tokenizer's file changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Path, tuple[tuple[str, int], Decoder | None]] = OrderedDict()

    def get(self, run_dir: Path) -> Decoder | None:
        """Return a run's decoder; None if it stores no tokenizer, or one that cannot be read."""
        path = tokenizer_file(run_dir)
        if path is None:
            return None
        sign = str(path), path.stat().st_mtime_ns
        with self._lock:
            known = self._known.get(run_dir)
            if known is None or known[0] != sign:
                try:
                    known = sign, load_decoder(run_dir)
                except Exception:  # the tokenizers library raises nothing more special for a damaged file
                    known = sign, None
            self._known[run_dir] = known
            self._known.move_to_end(run_dir)
            while len(self._known) > _DECODERS:
                self._known.popitem(last=False)
            return known[1]


def read_experience(row: dict[str, Any]) -> Experience:
    """Decode a line. Raises RollmillError if it is damaged."""
    try:
        return decode_experience(row)
    except (ValueError, KeyError, TypeError) as error:
        raise RollmillError(f"the completion {str(row.get('id'))[:100]!r} is damaged: {error!r}") from error


def token_page(experience: Experience, decode: Decoder | None, start: int) -> dict[str, Any]:
    """Describe a completion, and up to MOST_TOKENS of its tokens from index `start` on.

    Returns:
        Lists with an entry per token: `ids`, `texts`, `mask`, `logprobs`, `versions`, `advantage`, `trainer_logprobs`,
        `entropy` and `drafted` (a `DraftUse`); of those that are unknown, None.
    """
    total = len(experience.token_ids)
    start = min(max(start, 0), total)
    end = min(start + MOST_TOKENS, total)
    texts = _texts(experience, decode, start, end)
    drafted = drafted_tokens(experience)
    known = {name: getattr(experience, name) for name in ("advantage", "trainer_logprobs", "entropy")}
    floats = {name: None if values is None else values[start:end].tolist() for name, values in known.items()}
    return {
        **describe(experience),
        "response": experience.response[:_TURN_CHARS],
        "pictures": _pictures(experience),
        "start": start,
        "total": total,
        "first_action": int(experience.action_mask.argmax()) if experience.action_mask.any() else total,
        "ids": experience.token_ids[start:end].tolist(),
        "texts": texts,
        "mask": experience.action_mask[start:end].astype(int).tolist(),
        "logprobs": experience.logprobs[start:end].tolist(),
        "versions": experience.versions[start:end].tolist(),
        **floats,
        "drafted": None if drafted is None else drafted[start:end].tolist(),
        "turns": [[turn.role, turn.start, turn.end] for turn in experience.turns],
    }


def _pictures(experience: Experience) -> list[dict[str, Any]]:
    """Thumbnails of its pictures; they may be anywhere, but have to be the recorded ones, by their hash."""
    if not experience.info.get("images"):
        return []
    from rollmill.apps.studio.report.pictures import draw_thumbnails  # imports much

    return [asdict(each) for each in draw_thumbnails(experience)]


def describe(experience: Experience) -> dict[str, Any]:
    """All about a completion but its tokens."""
    return {
        "id": experience.id,
        "task": experience.task_id,
        "group": experience.group,
        "reward": experience.reward,
        "reward_parts": experience.reward_parts,
        "source": str(experience.source),
        "stop": str(experience.stop_reason),
        "temperature": experience.temperature,
        "timings": experience.timings,
        "info": {key: value for key, value in stored_info(experience).items() if key != DRAFTED_KEY},
        "length": experience.action_tokens,
    }


def _texts(experience: Experience, decode: Decoder | None, start: int, end: int) -> list[str]:
    """Texts of some tokens; decoding begins a few tokens earlier, since a character may be cut."""
    before = max(0, start - 8)
    part = Experience(
        id="",
        task_id="",
        group="",
        token_ids=experience.token_ids[before:end],
        action_mask=experience.action_mask[before:end],
        logprobs=experience.logprobs[before:end],
        versions=experience.versions[before:end],
    )
    return token_texts(part, decode)[start - before :]


@dataclass(slots=True)
class TurnNode:
    """A turn in the tree of a rollout; turns of several paths that are the same stand there once."""

    role: str
    text: str
    tokens: int
    logprob: float | None  #: mean of the policy's tokens
    paths: list[str] = field(default_factory=list)  #: ids of the experiences that go through it
    ends: list[dict[str, Any]] = field(default_factory=list)  #: the experiences that end with it
    children: list[TurnNode] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Nested dicts, without recursion: a chat may have thousands of turns."""
        made: dict[int, dict[str, Any]] = {}
        order = [self]
        for node in order:
            order += node.children
        for node in reversed(order):
            made[id(node)] = {
                "role": node.role,
                "text": node.text[:_TURN_CHARS],
                "left_out": max(0, len(node.text) - _TURN_CHARS),
                "tokens": node.tokens,
                "logprob": node.logprob,
                "paths": node.paths,
                "ends": node.ends,
                "children": [made[id(child)] for child in node.children],
            }
        return made[id(self)]


def turn_tree(experiences: Sequence[Experience], offsets: Sequence[int]) -> list[dict[str, Any]]:
    """Merge the turns of a rollout's experiences into trees, one for each first turn.

    Two turns are the same if role and tokens are, and all turns before them.

    Args:
        offsets: where the experiences begin in their file; each is named in the `ends` of its last turn.
    """
    roots: list[TurnNode] = []
    children_of: dict[int, dict[tuple[str, bytes], TurnNode]] = {}
    first: dict[tuple[str, bytes], TurnNode] = {}
    for experience, offset in zip(experiences, offsets, strict=True):
        level, siblings, node = first, roots, None
        for turn in experience.turns:
            tokens = experience.token_ids[turn.start : turn.end]
            node = level.get((turn.role, tokens.tobytes()))
            if node is None:
                counted = experience.action_mask[turn.start : turn.end]
                made = experience.logprobs[turn.start : turn.end][counted]
                mean = float(np.mean(made)) if made.size else None
                node = TurnNode(turn.role, turn.text, len(tokens), mean)
                level[turn.role, tokens.tobytes()] = node
                siblings.append(node)
            node.paths.append(experience.id)
            level, siblings = children_of.setdefault(id(node), {}), node.children
        if node is not None:
            node.ends.append(describe(experience) | {"offset": offset})
    return [root.as_json() for root in roots]
