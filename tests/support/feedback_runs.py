"""A small run directory with stored completions, as a run leaves it while it goes on; and a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollmill.apps.serve.web import ConnectionLimits
from rollmill.apps.serve.web.guard import TOKEN_CLIENT, RequestGuard
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.apps.studio.feedback import FeedbackService, open_feedback
from rollmill.apps.studio.feedback.server import build_server
from rollmill.buffer import ExperienceKind, Group
from rollmill.config.model import TokenizerConfig
from rollmill.models.from_scratch import train_tokenizer
from rollmill.models.run_tokenizer import save_run_tokenizer
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.types import Experience, StopReason, Turn
from support.waiting import answering

TEXTS = ["".join(map(chr, range(32, 127))), "How many apples are 12 and 3? The answer is 15.\n" * 4]
TOKENIZER = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), TEXTS)
END = TOKENIZER.eos_token_id
ANSWERS = ["12 and 3 is 15", "it is 16", "the answer is 15.", "  I do not\n\tknow  "]
REWARDS = [1.0, 0.0, 1.0, 0.25]


def completion(
    step: int, group: str, index: int, prompt: str, answer: str, reward: float | None = None, task: str = "apples"
) -> Experience:
    """A completion with tokens that encoding its text again would not give: two pieces are encoded one by one."""
    head = TOKENIZER.encode(prompt)
    tail = [*TOKENIZER.encode(answer[:3]), *TOKENIZER.encode(answer[3:]), END]
    rng = np.random.default_rng(index + 100 * step)
    mask = np.arange(len(head) + len(tail)) >= len(head)
    return Experience(
        id=f"{group}/{index}",
        task_id=task,
        group=group,
        token_ids=np.array([*head, *tail], np.int32),
        action_mask=mask,
        logprobs=np.where(mask, -rng.exponential(0.8, len(mask)), 0).astype(np.float32),
        versions=np.where(mask, step - 1 + (np.arange(len(mask)) % 2), -1).astype(np.int32),
        reward=reward,
        reward_parts={"exact": reward, "format": 1.0},
        stop_reason=StopReason.EOS,
        temperature=0.9,
        turns=[Turn("prompt", 0, len(head), prompt), Turn("assistant", len(head), len(mask), answer)],
        prompt=prompt,
        response=answer,
        info={"outcomes": {"exact": "ok", "format": "ok"}},
        advantage=mask.astype(np.float32),
    )


def groups_of(step: int) -> list[Experience]:
    """Two groups of four completions, and a demonstration that the page leaves out."""
    made = []
    for number in range(2):
        prompt = f"How many apples are {12 + number} and 3?\n"
        name = f"main-{2 * step + number:06d}"
        made += [
            completion(step, name, index, prompt, answer, reward if number else 1.0, f"apples/{number}")
            for index, (answer, reward) in enumerate(zip(ANSWERS, REWARDS, strict=True))
        ]
    return made


def make_run(folder: Path, steps: int = 2) -> Path:
    """A run directory with some steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("name: apples\nmodel: {path: new}\n")
    (folder / "machine.json").write_text(json.dumps({"threads": 1, "precision": "fp32", "run_id": "apples-1"}))
    save_run_tokenizer(folder, TOKENIZER, END)
    for step in range(1, steps + 1):
        RolloutLog(folder / "rollouts").write(step, groups_of(step))
    return folder


def of_kind(desk: FeedbackService, name: ExperienceKind) -> list[Group]:
    """What a reader of the store finds."""
    return [group for _, group in desk.acts._store.read(name)]


def everything(desk: FeedbackService) -> dict[str, list[Group]]:
    """All that a training run would read of feedback."""
    return {
        str(name): of_kind(desk, name)
        for name in (ExperienceKind.RATED, ExperienceKind.EXPERT, ExperienceKind.PREFERENCE)
    }


@dataclass
class Served:
    """A server that answers."""

    address: str
    desk: FeedbackService
    guard: RequestGuard


@contextmanager
def served(
    run_dir: Path,
    host: str = "127.0.0.1",
    token: str | None = None,
    keys: KeyRing | None = None,
    connections: ConnectionLimits | None = None,
    body_s: float = 60.0,
) -> Iterator[Served]:
    """A real server for a run, in a thread."""
    desk = open_feedback(run_dir)
    guard = RequestGuard(host, keys or (KeyRing([make_key(TOKEN_CLIENT, token)]) if token else None))
    server = build_server(desk, guard, "ann", connections=connections or ConnectionLimits(), body_s=body_s)
    try:
        with answering(server) as address:
            yield Served(address, desk, guard)
    finally:
        desk.acts._store.close()
