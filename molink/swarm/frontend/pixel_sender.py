"""Cuts the pixels of a request's images into messages, within a window."""

from collections.abc import Iterator, Sequence

from molink.facts.images import ImageInput
from molink.wire.messages.base import Payload
from molink.wire.messages.serving import PIXEL_FRAGMENT, PIXEL_WINDOW, PixelFragment


class PixelSender:
    """The pixels of one submission, one image after another."""

    def __init__(self, key: str, images: Sequence[ImageInput]) -> None:
        self._key = key
        self._fragments = _cut_images(key, images)
        #: Bytes sent, and acknowledged.
        self._num_sent = self._num_received = 0

    def next_fragments(self, received: int = 0) -> Iterator[tuple[PixelFragment, memoryview]]:
        """Return the messages to send, given that the scheduler has ``received`` bytes."""
        self._num_received = max(self._num_received, min(received, self._num_sent))
        while self._num_sent + PIXEL_FRAGMENT <= self._num_received + PIXEL_WINDOW:
            found = next(self._fragments, None)
            if found is None:
                return
            self._num_sent += found[1].nbytes
            yield found


def _cut_images(
    key: str, images: Sequence[ImageInput]
) -> Iterator[tuple[PixelFragment, memoryview]]:
    before = 0
    for image in images:
        pixels = memoryview(image.pixels)
        for first in range(0, len(pixels), PIXEL_FRAGMENT):
            part = pixels[first : first + PIXEL_FRAGMENT]
            yield PixelFragment(key, before + first, Payload("u8", (len(part),))), part
        before += len(pixels)
