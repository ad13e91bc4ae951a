"""Ranges of layers as people write them."""

from molink.facts.model import LayerRange


def parse_layers(text: str) -> LayerRange | None:
    """The half-open range of ``A:B``; ``None`` for ``auto``, ``none`` and malformed text."""
    first, colon, last = text.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        return None
    return int(first), int(last)
