"""Puts images into a rendered prompt: as tokenizer text, then as ids of their rows."""

from collections.abc import Callable, Sequence

from molink.checkpoint.vision import VisionConfig
from molink.errors import BrokenModel, RequestError
from molink.facts.images import MAX_PIXEL_BYTES, MAX_TILES, ImageInput, ImageSpan, narrow_id
from molink.images.cut import CutImage, tile_pixels

#: Encodes a text to token ids.
Encode = Callable[[str], Sequence[int]]


def encode_prompt(
    text: str, cuts: Sequence[CutImage], vision: VisionConfig, image_id: int, encode: Encode
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Encode a rendered prompt with its images; ``image_id`` is the placeholder token's id.

    Raises:
        RequestError: the text itself contains placeholders, or there are too many images.
        BrokenModel: the tokenizer lacks a token that stands for images.
    """
    tiles = sum(len(cut.tiles) for cut in cuts)
    nbytes = sum(3 * tile.width * tile.height for cut in cuts for tile in cut.tiles)
    if tiles > MAX_TILES or nbytes > MAX_PIXEL_BYTES:
        raise RequestError(
            f"`messages`: the images have {tiles} tiles of {nbytes} bytes together; at most "
            f"{MAX_TILES} of {MAX_PIXEL_BYTES} (send fewer, smaller ones, or `detail` low)",
            "messages",
        )
    first, *rest = text.split(vision.rules.placeholder)
    if len(rest) != len(cuts):
        raise RequestError(
            f"`messages`: the prompt shows {len(rest)} images ({vision.rules.placeholder}), but "
            f"there are {len(cuts)}",
            "messages",
        )
    shown = first + "".join(f"{cut.text}{after}" for cut, after in zip(cuts, rest, strict=True))
    ids = list(encode(shown))
    return ids, _place_images(ids, cuts, vision, image_id)


def _place_images(
    ids: list[int], cuts: Sequence[CutImage], vision: VisionConfig, image_id: int
) -> tuple[ImageInput, ...]:
    """Find the images' rows among ``ids`` and replace them by ids derived from pixels."""
    places = [position for position, token in enumerate(ids) if token == image_id]
    images, first = [], 0
    for cut in cuts:
        for tile, line, pixels in zip(cut.tiles, cut.lines, tile_pixels(cut), strict=True):
            rows = vision.count_rows(tile.height, tile.width)
            own = places[first : first + rows]
            first += rows
            if len(own) < rows:
                raise _unexpected_tokens(vision)
            span = ImageSpan(own[0], own[-1] + 1 - own[0], tile.height, tile.width, line)
            image = ImageInput(span, pixels)
            placed = image.place_ids()
            if [*placed] != own:
                raise _unexpected_tokens(vision)
            for position, token in placed.items():
                ids[position] = narrow_id(token)
            images.append(image)
    if first != len(places):
        raise RequestError(
            f"`messages`: a text has the token of images, {vision.rules.token}", "messages"
        )
    return tuple(images)


def _unexpected_tokens(vision: VisionConfig) -> BrokenModel:
    rules = vision.rules
    tokens = ", ".join(filter(None, (rules.token, rules.line_end, rules.opening, rules.closing)))
    return BrokenModel(f"the tokenizer does not know the tokens of images: {tokens!r}")
