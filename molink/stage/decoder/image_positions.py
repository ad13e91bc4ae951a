"""RoPE positions of prompts with images (M-RoPE, arXiv 2409.12191, §2.1).

An image's row has three positions: the image's start, and its own line and column counted from the
start. Text has one. An image advances the position by the number of cells along its longer side.
"""

from collections.abc import Iterator, Sequence

from molink.facts.images import ImageSpan
from molink.stage.batch import SequenceRows


def shift_after(images: Sequence[ImageSpan], position: int, cell: int) -> int:
    """Return the shift of the text ``position`` after ``images`` with cells of ``cell`` pixels."""
    return sum(
        max(span.height, span.width) // cell - span.count for span in images if span.end <= position
    )


def rotated_positions(sequence: SequenceRows, cell: int) -> Iterator[tuple[int, int, int]]:
    """Yield each row's three positions: image start, line and column."""
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
