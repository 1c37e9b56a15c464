"""Perceptual hashes of pictures: equal for a picture that was scaled, compressed or stored in another format.

The difference hash ("Kind of Like That", N. Krawetz 2013): the signs of the differences between neighbours in a
thumbnail of 9 x 8 grey values, 64 bits. It does not see colours, so mean colours are compared as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollmill.data.images import ImageRef, decode_picture, read_image
from rollmill.errors import ConfigError

_WIDTH, _HEIGHT = 9, 8
_BITS = (_WIDTH - 1) * _HEIGHT
_MOST_COLOUR = 12
"""Largest difference of the mean of a colour channel (0 to 255) of pictures that are alike."""


@dataclass(frozen=True, slots=True)
class PictureHash:
    """Perceptual hash of a picture: 64 bits of its shapes, and the mean of each colour channel (0 to 255)."""

    bits: int
    colour: tuple[int, ...]

    def alike(self, other: PictureHash, distance: int) -> bool:
        """True if at most `distance` bits differ, and the mean colours are close."""
        near = all(abs(a - b) <= _MOST_COLOUR for a, b in zip(self.colour, other.colour, strict=True))
        return near and (self.bits ^ other.bits).bit_count() <= distance


def hash_picture(ref: ImageRef) -> PictureHash:
    """Hash a picture. Raises TasksetError if it has changed or cannot be decoded."""
    from PIL import Image

    plain = decode_picture(read_image(ref), f"the image {ref.path}")
    small = plain.convert("L").resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS).tobytes()
    bits = 0
    for row in range(_HEIGHT):
        for column in range(_WIDTH - 1):
            at = row * _WIDTH + column
            bits = bits << 1 | (small[at + 1] > small[at] + 1)  # +1: noise of compression is no shape
    return PictureHash(bits, tuple(plain.resize((1, 1), Image.Resampling.BOX).tobytes()))


class PictureIndex:
    """Finds earlier lists of pictures that are alike, picture by picture.

    Args:
        distance: most bits that differ. Of `distance` + 1 parts of such hashes at least one is equal, so only those
            with an equal part are compared.
    """

    def __init__(self, distance: int) -> None:
        if not 0 <= distance < _BITS:
            raise ConfigError(f"distance is {distance}; a hash of a picture has {_BITS} bits")
        self._distance = distance
        self._found: dict[tuple[int, int, int], list[int]] = {}
        self._kept: list[Sequence[PictureHash]] = []

    def find(self, pictures: Sequence[PictureHash]) -> int:
        """Number of the first list whose pictures are alike; without one, this list is added with the next number."""
        parts = [(len(pictures), *part) for part in self._parts(pictures)]
        for number in sorted({number for part in parts for number in self._found.get(part, ())}):
            if all(a.alike(b, self._distance) for a, b in zip(self._kept[number], pictures, strict=True)):
                return number
        for part in parts:
            self._found.setdefault(part, []).append(len(self._kept))
        self._kept.append(pictures)
        return len(self._kept) - 1

    def _parts(self, pictures: Sequence[PictureHash]) -> Iterator[tuple[int, int]]:
        """Parts of the first picture's hash, by number."""
        if not pictures:
            yield 0, 0
            return
        bits, count = pictures[0].bits, self._distance + 1
        for number in range(count):
            start, end = _BITS * number // count, _BITS * (number + 1) // count
            yield number, bits >> start & (1 << end - start) - 1
