"""Assembles the images of a submitted request, and checks that its ids stand for them."""

from collections.abc import Sequence
from itertools import accumulate

from molink.checkpoint.vision import VisionConfig
from molink.errors import RequestError
from molink.facts.images import FIRST_IMAGE_ID, MAX_PIXEL_BYTES, ImageInput, ImageSpan, narrow_id
from molink.wire.messages.serving import PIXEL_FRAGMENT


class IncomingImages:
    """The images of one request, whose pixels arrive one after another.

    Nothing of a peer is trusted: places, sizes, the number of pixels, and the ids, since cached
    blocks are found by these.
    """

    def __init__(
        self, spans: Sequence[ImageSpan], vision: VisionConfig | None, num_prompt_tokens: int
    ) -> None:
        """Check the places and sizes.

        Raises:
            RequestError: the model takes no such images.
        """
        if spans and vision is None:
            raise RequestError("this model takes no images", "messages")
        end = 0
        for span in spans:
            if not end <= span.start < span.end <= num_prompt_tokens:
                raise RequestError(f"an image at token {span.start} is not in order")
            end = span.end
            if vision is not None:
                _check_size(span, vision)
        self._spans = tuple(spans)
        self._pixels = bytearray()
        #: Ids of images' rows by position, once all pixels have arrived.
        self._placed: dict[int, int] = {}
        self._num_bytes = sum(span.num_pixel_bytes for span in spans)
        if self._num_bytes > MAX_PIXEL_BYTES:
            raise RequestError(
                f"images of {self._num_bytes} bytes; at most {MAX_PIXEL_BYTES}", "messages"
            )

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """Where they lie in the prompt."""
        return self._spans

    @property
    def num_received(self) -> int:
        """Bytes of pixels so far."""
        return len(self._pixels)

    @property
    def is_complete(self) -> bool:
        """Whether all pixels have arrived."""
        return len(self._pixels) == self._num_bytes

    def held_bytes(self, row_bytes: int) -> int:
        """Memory that they take, first as pixels, then as rows of the decoder."""
        rows = sum(span.num_rows for span in self._spans)
        return max(self._num_bytes, rows * row_bytes)

    def add_pixels(self, first: int, data: memoryview) -> None:
        """Add pixels from byte ``first`` on.

        Raises:
            RequestError: they don't follow the others, or are too many, or too few to go on waiting
                for the rest.
        """
        end = first + data.nbytes
        if first != len(self._pixels) or end > self._num_bytes:
            raise RequestError(f"pixels at {first} do not follow {len(self._pixels)}")
        ends = accumulate(span.num_pixel_bytes for span in self._spans)
        if data.nbytes < PIXEL_FRAGMENT and (first == end or end not in ends):
            raise RequestError(f"{data.nbytes} bytes of pixels that end within an image")
        self._pixels += data

    def take_images(self, ids: Sequence[int]) -> tuple[ImageInput, ...]:
        """Return the images of a prompt that begins with ``ids``; they are held no longer.

        Raises:
            RequestError: the ids don't stand for these pixels.
        """
        images, first = [], 0
        for span in self._spans:
            pixels = bytes(memoryview(self._pixels)[first : first + span.num_pixel_bytes])
            images.append(ImageInput(span, pixels))
            first += span.num_pixel_bytes
        self._pixels = bytearray()
        self._placed = {at: token for image in images for at, token in image.place_ids().items()}
        found = {at: token for at, token in enumerate(ids) if token >= FIRST_IMAGE_ID}
        if found != {at: narrow_id(token) for at, token in self._placed.items()}:
            raise RequestError("the prompt's ids do not stand for its images", "prompt")
        return tuple(images)

    def widen_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return a prompt's ids with those of its images as :meth:`.ImageInput.place_ids` does."""
        made = [*ids]
        for at, token in self._placed.items():
            made[at] = token
        return tuple(made)


def _check_size(span: ImageSpan, vision: VisionConfig) -> None:
    try:
        rows = vision.count_rows(span.height, span.width)
    except ValueError as error:
        raise RequestError(f"an image of {error}") from error
    if rows != span.num_rows:
        raise RequestError(
            f"an image of {span.width}x{span.height} pixels has {rows} tokens, not {span.num_rows}"
        )
