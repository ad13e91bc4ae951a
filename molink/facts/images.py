"""Positions of a prompt's images, and the token ids of their rows.

An image's rows have ids hashed from its pixels, so that prompts share cached blocks only if they
have the same images there. The ids are beyond any vocabulary.
"""

from collections.abc import Sequence
from hashlib import blake2b, shake_128
from typing import Annotated

import msgspec

from molink.facts.scalars import Index

#: The lowest id of an image's row.
FIRST_IMAGE_ID = 1 << 30
#: Maximum images per request, and maximum tiles into which all are cut.
MAX_IMAGES, MAX_TILES = 32, 128
#: Maximum pixel bytes per request, at 3 bytes per pixel.
MAX_PIXEL_BYTES = 96 << 20
CHANNELS = 3
_ID_BYTES = 4
#: Bits of a token id on the wire, and bytes of an image's digest before them in the prefix cache.
_WIRE_BITS, _SCOPE_BYTES = 31, 16

_Extent = Annotated[int, msgspec.Meta(ge=1, le=2**14)]


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """``count`` tokens from ``start`` on that stand for an image of ``height`` x ``width`` pixels.

    A text token follows every ``line`` rows of the image; with 0 there are no such tokens.
    """

    start: Index
    count: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    height: _Extent
    width: _Extent
    line: Annotated[int, msgspec.Meta(ge=0, le=2**14)] = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.count

    @property
    def num_rows(self) -> int:
        """Number of tokens that stand for rows of the image."""
        return self.count - (self.count // (self.line + 1) if self.line else 0)

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of its pixels."""
        return self.height * self.width * CHANNELS

    def row_at(self, position: int) -> int | None:
        """Return the image row at the token ``position``; ``None`` for text."""
        offset = position - self.start
        if not 0 <= offset < self.count:
            return None
        if not self.line:
            return offset
        lines, column = divmod(offset, self.line + 1)
        return None if column == self.line else lines * self.line + column


def count_uncut(spans: Sequence[ImageSpan], start: int, count: int) -> int:
    """Adjust ``count`` rows from position ``start`` on so that they don't end inside an image.

    Stop before the image if that leaves any row; otherwise go on to its end.
    """
    end = start + count
    cut = next((span for span in spans if span.start < end < span.end), None)
    if cut is None:
        return count
    return (cut.start if cut.start > start else cut.end) - start


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt: its span, and its RGB pixels line by line."""

    span: ImageSpan
    pixels: bytes

    @property
    def digest(self) -> bytes:
        """Hash of its pixels and their shape."""
        shape = f"{self.span.height}x{self.span.width}".encode()
        return blake2b(self.pixels, digest_size=32, person=shape).digest()

    @property
    def row_ids(self) -> list[int]:
        """Token ids of the image's rows; equal images have equal ids."""
        return _derive_ids(self.digest, self.span.num_rows)

    def place_ids(self) -> dict[int, int]:
        """Token ids of the image's rows by position in the prompt, for a prefix cache.

        Each begins with the image's digest: images that differ share no id, whoever made them.
        :func:`narrow_id` returns the ids on the wire.
        """
        span, digest = self.span, self.digest
        scope = int.from_bytes(digest[:_SCOPE_BYTES], "little") << _WIRE_BITS
        ids = _derive_ids(digest, span.num_rows)
        rows = ((position, span.row_at(position)) for position in range(span.start, span.end))
        return {position: scope | ids[row] for position, row in rows if row is not None}


def narrow_id(token: int) -> int:
    """Return the id on the wire of a token in a prefix cache; the same unless it shows an image."""
    return token & ((1 << _WIRE_BITS) - 1)


def _derive_ids(digest: bytes, count: int) -> list[int]:
    words = shake_128(digest).digest(_ID_BYTES * count)
    return [
        FIRST_IMAGE_ID | int.from_bytes(words[at : at + _ID_BYTES], "little") >> 2
        for at in range(0, len(words), _ID_BYTES)
    ]
