"""Frames come out as they went in, however the stream is cut; anything else is an error or a wait, never more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill_sandbox.frames import FrameError, FrameReader, FrameTooLongError, pack_frame

FRAMES = st.lists(st.lists(st.binary(max_size=50), max_size=5), max_size=5)


def _all(frames: FrameReader) -> list[list[bytes]]:
    found = []
    while (frame := frames.take()) is not None:
        found.append(frame)
    return found


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_every_cut(sent: list[list[bytes]], sizes: list[int]) -> None:
    stream = b"".join(pack_frame(*parts) for parts in sent)
    frames, found, place = FrameReader(1000), [], 0
    while place < len(stream):
        size = sizes[place % len(sizes)]
        frames.feed(stream[place : place + size])
        found += _all(frames)
        place += size
    assert found == sent


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_an_error(stream: bytes) -> None:
    frames = FrameReader(100)
    frames.feed(stream)
    try:
        found = _all(frames)
    except FrameError:
        return
    assert stream.startswith(b"".join(pack_frame(*parts) for parts in found))


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"\0\0\0\x65" + bytes(0x65), FrameTooLongError),
        (b"\xff\xff\xff\xff", FrameTooLongError),
        (b"\0\0\0\3\0\0\0", FrameError),
        (b"\0\0\0\5\0\0\0\2x", FrameError),
    ],
)
def test_what_is_no_frame_is_an_error(stream: bytes, error: type[Exception]) -> None:
    frames = FrameReader(100)
    frames.feed(stream)
    with pytest.raises(error):
        frames.take()
