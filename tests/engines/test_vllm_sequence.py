"""Completions of vLLM as this process sees them: they end at the token where the native engine's end, however vLLM's
messages cut them, and whatever they were begun with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import toy_tokenizer

from rollmill.config.rollout import RepetitionConfig, SamplingConfig
from rollmill.engines.base import CompletionPrefix, GenerationRequest, TokenPenalties
from rollmill.engines.logits_processors import PenaltyProcessor
from rollmill.engines.native.sequence import SequenceState, build_sequence_group
from rollmill.engines.vllm.process import make_engine_folder
from rollmill.engines.vllm.sequence import NOTHING_MORE, VLLMSequence, build_vllm_sequence_group
from rollmill.errors import UnsupportedRequestError
from rollmill.types import Completion, StopReason

TOKENIZER = toy_tokenizer("char")
A, B = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "ab")
END = 9
SAMPLING = SamplingConfig(
    max_new_tokens=20,
    stop=["abba"],
    stop_token_ids=[END],
    repetition=RepetitionConfig(period=3, times=3, tokens=5),
)


def prefix_of(tokens: list[int], version: int) -> CompletionPrefix:
    size = len(tokens)
    return CompletionPrefix(
        np.asarray(tokens, np.int32),
        np.asarray([-0.5 - at / 100 for at in range(size)], np.float32),
        np.zeros(size, np.float32),
        np.full(size, version, np.int32),
    )


def native(tokens: list[int]) -> tuple[list[int], StopReason | None]:
    """Tokens and end of a completion that samples these, by the native engine."""
    group = build_sequence_group(GenerationRequest([1, 2], SAMPLING), TOKENIZER, frozenset(), 64)
    row = SequenceState(group, 0)
    for token in tokens:
        if row.append(token, -1.0, 0.0, 1):
            break
    return row.tokens, row.stop_reason


def by_vllm(tokens: list[int], begun: int, cuts: list[int]) -> Completion:
    """The completion that vLLM samples: it ends at end ids and at the limit, or is aborted some tokens late."""
    request = GenerationRequest([1, 2], SAMPLING, prefixes=[prefix_of(tokens[:begun], 4)])
    group = build_vllm_sequence_group(request, TOKENIZER, frozenset(), 64)
    sequence = VLLMSequence(group, 0, 1, request.prefixes[0])
    if sequence.stop_reason is not None:
        return sequence.completion(NOTHING_MORE)
    [(_, _, limit, own)] = group.message([sequence])["samples"]
    assert own == tokens[:begun]
    left = tokens[begun : begun + limit]
    ends = next((at + 1 for at, token in enumerate(left) if token == END), len(left))
    sent, message = left[:ends], dict[str, Any]()
    why = "stop" if END in sent else "length" if ends == limit else "abort"
    edges = sorted({0, ends, *(cut for cut in cuts if cut < ends)})
    for start, end in zip(edges, edges[1:] or [0], strict=False):
        message = {"tokens": sent[start:end], "logprobs": [-2.0] * (end - start)}
        sequence.add(message)
    return sequence.completion({**message, "ended": why, "versions": [(6, ends)]})


@given(
    st.lists(st.sampled_from([A, A, A, B, B, END]), max_size=30),
    st.integers(0, 30),
    st.lists(st.integers(0, 30), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_completions_end_where_those_of_the_native_engine_do(tokens: list[int], begun: int, cuts: list[int]) -> None:
    begun = min(begun, len(tokens))
    expected, reason = native(tokens)
    found = by_vllm(tokens, begun, cuts)
    count = len(expected)
    assert found.token_ids.tolist() == expected
    assert found.stop_reason is (reason or StopReason.ABORTED)
    kept = min(begun, count)
    earlier = prefix_of(tokens[:begun], 4)
    assert found.logprobs.tolist() == [*earlier.logprobs[:kept].tolist(), *[-2.0] * (count - kept)]
    assert found.versions.tolist() == [4] * kept + [6] * (count - kept)
    assert len(found.kept_logmass) == count


def test_a_continued_completion_gets_other_random_numbers() -> None:
    request = GenerationRequest([1, 2], SAMPLING, n=2, seed=5)
    group = build_vllm_sequence_group(request, TOKENIZER, frozenset(), 64)
    seeds = [VLLMSequence(group, 0, 1, prefix).seed for prefix in (None, prefix_of([], 4), prefix_of([A, B], 4))]
    assert seeds[0] == seeds[1] != seeds[2]
    assert VLLMSequence(group, 1, 1, prefix_of([A, B], 4)).seed not in seeds


def test_abandoned_folders_are_removed_and_others_stay(tmp_path: Path) -> None:
    """Folders of engines in shared memory: in use as long as they are locked."""
    used, lock = make_engine_folder(tmp_path)
    left, other = make_engine_folder(tmp_path)
    assert lock is not None
    assert other is not None
    (left / "weights").write_bytes(b"large")
    (tmp_path / "rollmill-vllm-of-an-older-version").mkdir()
    other.close()  # as the end of its process does
    made, _ = make_engine_folder(tmp_path)
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([used, made, tmp_path / "rollmill-vllm-of-an-older-version"])
    assert used.is_dir()
    lock.close()


@pytest.mark.parametrize(
    "change",
    [
        {"new_processor": lambda: PenaltyProcessor(TokenPenalties(presence=1.0), [A])},
        {"record_top": 2},
    ],
)
def test_what_vllm_cannot_record_exactly_is_refused(change: dict[str, Any]) -> None:
    request = GenerationRequest([A], **{"sampling": SamplingConfig(), **change})
    with pytest.raises(UnsupportedRequestError, match="engine `native`"):
        build_vllm_sequence_group(request, TOKENIZER, frozenset(), 64)
