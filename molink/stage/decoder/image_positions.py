"""Positions by which rows of a prompt with images are rotated (M-RoPE, arXiv 2409.12191, §2.1).

A row of an image has three: the image's place, its line and its column, all counted from the place.
Text has one; an image takes as many positions as its longer side has cells.
"""

from collections.abc import Iterator, Sequence

from molink.facts.images import ImageSpan
from molink.stage.batch import SequenceRows


def shift_after(images: Sequence[ImageSpan], position: int, cell: int) -> int:
    """What is added to the ``position`` of text after ``images`` of cells of ``cell`` pixels."""
    return sum(
        max(span.height, span.width) // cell - span.count for span in images if span.end <= position
    )


def rotated_positions(sequence: SequenceRows, cell: int) -> Iterator[tuple[int, int, int]]:
    """Place, line and column of each row."""
    images = sequence.images
    for position in range(sequence.start, sequence.end):
        place = position + shift_after(images, position, cell)
        span = next((span for span in images if span.start <= position < span.end), None)
        if span is None:
            yield place, place, place
            continue
        place -= position - span.start
        line, column = divmod(position - span.start, max(1, span.width // cell))
        yield place, place + line, place + column
