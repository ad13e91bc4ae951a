"""Resizes and cuts an image for a vision tower, as the released processors do.

Each layout of :class:`.ImageRules` has its rule: one square, tiles and a thumbnail, whole cells, or
as many cells as an image may have.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from molink.checkpoint.vision import ImageRules, VisionConfig
from molink.errors import RequestError

#: Longest edge of an image with low ``detail``, as in OpenAI's API.
LOW_DETAIL = 512
#: Tokens of an image with low ``detail`` if its size is a number of tokens.
_LOW_CELLS = 70
#: Maximum ratio of an image's edges if it is resized to whole cells.
_MAX_RATIO = 200
#: Longest edge of an image before it is cut into tiles.
_MAX_TILED = 4096


@dataclass(frozen=True, slots=True)
class CutImage:
    """The tiles of an image for the tower, and its text in the prompt.

    The text has each tile's placeholder tokens in order. ``lines`` has, for each tile, the number
    of rows after which a text token follows; 0: none.
    """

    tiles: tuple[Image.Image, ...]
    text: str
    lines: tuple[int, ...]


def cut_image(image: Image.Image, vision: VisionConfig, *, low_detail: bool = False) -> CutImage:
    """Cut an RGB ``image``; with ``low_detail`` into fewer rows."""
    rules = vision.rules
    if rules.layout == "budget":
        width, height = _fill_budget(*image.size, vision, low_detail=low_detail)
        return _show_whole(_resize(image, width, height, rules), vision)
    if low_detail and max(image.size) > LOW_DETAIL:
        image = image.copy()
        image.thumbnail((LOW_DETAIL, LOW_DETAIL), Image.Resampling(rules.resample))
    match rules.layout:
        case "square":
            return _show_whole(_resize(image, rules.size, rules.size, rules), vision)
        case "tiles":
            return _cut_tiles(image, vision, tiled=bool(rules.longest) and not low_detail)
        case "lines":
            return _cut_lines(image, vision)
        case "cells":
            width, height = _fit_area(*image.size, vision)
            return _show_whole(_resize(image, width, height, rules), vision)


def _resize(image: Image.Image, width: int, height: int, rules: ImageRules) -> Image.Image:
    return image.resize((width, height), Image.Resampling(rules.resample))


def _show_whole(image: Image.Image, vision: VisionConfig) -> CutImage:
    rules = vision.rules
    tokens = rules.token * vision.count_rows(image.height, image.width)
    return CutImage((image,), f"{rules.opening}{tokens}{rules.closing}", (0,))


# --- tiles ---------------------------------------------------------------------------------------


def _cut_tiles(image: Image.Image, vision: VisionConfig, *, tiled: bool) -> CutImage:
    """Cut into Idefics 3's tiles, with their line and column, followed by the whole image."""
    rules, side = vision.rules, vision.rules.size
    image = _resize(image, *_fit_longest(*image.size, rules.longest or side), rules)
    if tiled:
        image = _resize(image, *_fit_tiles(*image.size, side), rules)
    whole = _show_whole(_resize(image, side, side, rules), vision)
    if not tiled or max(image.size) <= side:
        return whole
    tokens = rules.token * vision.count_rows(side, side)
    text, tiles = "", []
    for line in range(image.height // side):
        for column in range(image.width // side):
            place = f"<row_{line + 1}_col_{column + 1}>"
            text += f"{rules.closing}{place}{tokens}"
            box = column * side, line * side, (column + 1) * side, (line + 1) * side
            tiles.append(image.crop(box))
        text += "\n"
    every = (*tiles, *whole.tiles)
    return CutImage(every, f"{text}\n{whole.text}", (0,) * len(every))


def _fit_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return a size whose longer edge is ``longest``, and whose other edge is even."""
    longest = min(longest, _MAX_TILED)
    ratio = width / height
    if width >= height:
        shorter = int(longest / ratio)
        return longest, max(shorter + shorter % 2, 1)
    shorter = int(longest * ratio)
    return max(shorter + shorter % 2, 1), longest


def _fit_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Return a size of whole tiles."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return width, math.ceil(int(width / ratio) / side) * side
    height = math.ceil(height / side) * side
    return math.ceil(int(height * ratio) / side) * side, height


# --- lines ---------------------------------------------------------------------------------------


def _cut_lines(image: Image.Image, vision: VisionConfig) -> CutImage:
    """Resize to whole cells; in the prompt, each line of cells but the last ends with a token."""
    rules, cell = vision.rules, vision.cell_pixels
    ratio = max(max(image.size) / rules.size, 1.0)
    columns, lines = (-(-int(extent / ratio) // cell) for extent in image.size)
    columns, lines = max(columns, 1), max(lines, 1)
    image = _resize(image, columns * cell, lines * cell, rules)
    shown = rules.line_end.join([rules.token * columns] * lines)
    return CutImage(
        (image,), f"{rules.opening}{shown}{rules.closing}", (columns if lines > 1 else 0,)
    )


def _fit_area(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Return a size of whole cells within the bounds of pixels, with a similar aspect ratio."""
    rules, cell = vision.rules, vision.cell_pixels
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise RequestError(
            f"`messages`: an image of {width}x{height} pixels is too narrow for this model: at "
            f"most {_MAX_RATIO} times as long as wide",
            "messages",
        )
    columns, lines = round(width / cell), round(height / cell)
    if columns * lines * cell**2 > rules.most_pixels:
        shrink = math.sqrt(width * height / rules.most_pixels)
        columns, lines = (max(1, math.floor(size / shrink / cell)) for size in (width, height))
    elif columns * lines * cell**2 < rules.least_pixels:
        grow = math.sqrt(rules.least_pixels / (width * height))
        columns, lines = (math.ceil(size * grow / cell) for size in (width, height))
    return min(columns * cell, rules.size), min(lines * cell, rules.size)


def _fill_budget(
    width: int, height: int, vision: VisionConfig, *, low_detail: bool
) -> tuple[int, int]:
    """Return the largest size of whole cells within the budget, with a similar aspect ratio."""
    cell = vision.cell_pixels
    most = vision.rules.most_pixels // cell**2
    most = min(most, _LOW_CELLS) if low_detail else most
    factor = math.sqrt(most * cell**2 / (height * width))
    columns, lines = (math.floor(factor * size / cell) for size in (width, height))
    longest = min(most, vision.rules.size // cell)
    if not lines:
        lines, columns = 1, max(width // height, 1)
    elif not columns:
        columns, lines = 1, max(height // width, 1)
    return min(columns, longest) * cell, min(lines, longest) * cell


def tile_pixels(cut: CutImage) -> Iterator[bytes]:
    """Return the RGB pixels of each tile, line by line."""
    return (tile.tobytes() for tile in cut.tiles)
