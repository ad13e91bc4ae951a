"""Formats and parses layers and stages for people: counted from 1, both ends included."""

import re
from collections.abc import Iterable

from molink.facts.model import LayerRange

_RANGE = re.compile(r"([0-9]{1,6})(?:[-–]([0-9]{1,6}))?\Z")


def parse_layers(text: str) -> LayerRange | None:
    """Parse ``A-B`` or ``A`` to a half-open range from 0; ``None`` for any other text.

    >>> parse_layers("1-22")
    (0, 22)
    """
    match = _RANGE.match(text)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    return (first - 1, last) if 1 <= first <= last else None


def format_layers(layers: LayerRange) -> str:
    """Format a range for :func:`parse_layers`: (0, 22) as ``1-22``, (4, 5) as ``5``."""
    first, last = layers
    return str(last) if last == first + 1 else f"{first + 1}-{last}"


def format_ranges(layers: Iterable[LayerRange]) -> str:
    """Format ranges as ``3-4, 8``."""
    return ", ".join(map(format_layers, layers))


def stage_number(index: int) -> int:
    """Return the number, counted from 1, of the stage with this ``index``."""
    return index + 1
