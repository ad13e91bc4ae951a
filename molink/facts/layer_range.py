"""Layers and stages as people read and type them: counted from 1, with both ends included."""

import re
from collections.abc import Iterable

from molink.facts.model import LayerRange

_RANGE = re.compile(r"([0-9]{1,6})(?:[-–]([0-9]{1,6}))?\Z")


def parse_layers(text: str) -> LayerRange | None:
    """The half-open range, from 0, of ``A-B`` or ``A``; ``None`` for any other text.

    >>> parse_layers("1-22")
    (0, 22)
    """
    match = _RANGE.match(text)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    return (first - 1, last) if 1 <= first <= last else None


def format_layers(layers: LayerRange) -> str:
    """What :func:`parse_layers` parses: ``1-22`` for (0, 22), ``5`` for (4, 5)."""
    first, last = layers
    return str(last) if last == first + 1 else f"{first + 1}-{last}"


def format_ranges(layers: Iterable[LayerRange]) -> str:
    """Format as ``3-4, 8``."""
    return ", ".join(map(format_layers, layers))


def stage_number(index: int) -> int:
    """The number of the stage with that ``index``, for people."""
    return index + 1
