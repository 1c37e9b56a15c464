"""Pictures in the messages of clients: decoded from `data:` URLs, bounded in size, and never fetched."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.apps.serve.endpoint.protocol import ApiError, ChatMessageParam, ContentPartParam
from rollmill.data.content_parts import AUDIO, MEDIA_TYPES
from rollmill.data.images import ImageRef, PictureFolder
from rollmill.data.picture_turns import refer_to
from rollmill.errors import ConfigError

MAX_PIXELS = 1 << 26
"""Most pixels of all pictures of a request together; decoded, they take three bytes each."""
_PICTURES = ("image_url", "input_image")


def shows_pictures(messages: Sequence[ChatMessageParam]) -> bool:
    """True if some message has a part that is a picture, so that the request takes long to prepare."""
    contents = [each.content for each in messages if isinstance(each.content, list)]
    return any(part.type in _PICTURES for content in contents for part in content)


class PictureReader:
    """Reads the pictures of one request.

    Args:
        sees: whether the model is a vision-language model.
        folder: keeps the pictures.
    """

    def __init__(self, sees: bool = False, folder: PictureFolder | None = None) -> None:
        self._sees, self._folder, self._pixels = sees, folder or PictureFolder(), 0

    def text(self, part: ContentPartParam, at: str) -> str:
        """A content part as text, in which a picture is a reference; a part that was read before is not read again.

        Raises ApiError, naming the place `at`, for a part of another type, and a picture that is no `data:` URL, cannot
        be read or is too large.
        """
        if part.type in ("text", "input_text", "output_text") and part.text is not None:
            return part.text
        if part.type in AUDIO:
            raise _refused(f"{at} holds audio, which is not supported; send text", at)
        if part.type not in _PICTURES:
            readable = "text and pictures" if self._sees else "text only"
            raise _refused(f"{at} holds a part of type {part.type[:40]!r}; this model reads {readable}", at)
        if not self._sees:
            raise _refused(f"{at} holds a part of type {part.type!r}, a picture; this model reads text only", at)
        image = part.image or self._read(part, at)
        part.keep(image)
        self._require_room(image, at)
        self._pixels += image.width * image.height
        return refer_to(image)

    def _require_room(self, image: ImageRef, at: str) -> None:
        if self._pixels + image.width * image.height > MAX_PIXELS:
            text = f"the pictures have more than {MAX_PIXELS >> 20} million pixels together; scale them down"
            raise ApiError(text, code="invalid_value", param=f"{at}.content")

    def _read(self, part: ContentPartParam, at: str) -> ImageRef:
        given = part.image_url
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str):
            raise _refused(f"{at} holds a picture without `image_url`; send data:image/png;base64,...", at)
        if not url.startswith("data:"):
            text = f"{at} holds a picture by address ({url[:80]!r}); nothing is fetched: send data:image/png;base64,..."
            raise _refused(text, at)

        def accept(found: ImageRef) -> None:
            if found.media_type not in MEDIA_TYPES:
                one_of = ", ".join(MEDIA_TYPES)
                raise _refused(f"{at} holds a picture of type {found.media_type}; send one of {one_of}", at)
            self._require_room(found, at)

        try:
            return self._folder.keep(url, at, accept)
        except (ValueError, ConfigError) as error:
            raise _refused(str(error), at) from error


def _refused(text: str, at: str) -> ApiError:
    return ApiError(text, code="unsupported_content", param=f"{at}.content")
