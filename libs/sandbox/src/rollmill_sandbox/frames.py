"""Frames of byte strings for a session, read without trusting the sender.

A frame is its length and its parts, each preceded by its length; lengths are 4 bytes, big endian. Nothing is unpickled.
"""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("!I")


class FrameError(ValueError):
    """Bytes that are not a frame."""


class FrameTooLongError(FrameError):
    """A frame longer than allowed."""


def pack_frame(*parts: bytes) -> bytes:
    """Pack one frame."""
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a stream into frames of at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Append the next bytes of the stream."""
        self._bytes += chunk

    def take(self) -> list[bytes] | None:
        """Return the parts of the next complete frame, None if it is incomplete. Raises FrameError."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._bytes)
        if size > self._most:
            raise FrameTooLongError(f"a frame of {size} bytes; {self._most} are allowed")
        if len(self._bytes) < _LENGTH.size + size:
            return None
        body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + size])
        del self._bytes[: _LENGTH.size + size]
        return _parts_of(body)


def _parts_of(body: bytes) -> list[bytes]:
    parts, place = [], 0
    while place < len(body):
        if place + _LENGTH.size > len(body):
            raise FrameError("a frame that breaks off")
        (size,) = _LENGTH.unpack_from(body, place)
        place += _LENGTH.size
        if place + size > len(body):
            raise FrameError("a part that is longer than its frame")
        parts.append(body[place : place + size])
        place += size
    return parts
