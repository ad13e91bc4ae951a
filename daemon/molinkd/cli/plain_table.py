"""Plain text in columns, also of wide characters."""

import re
import textwrap
from collections.abc import Sequence

from molink.plaintext import printable

#: A wide character, or a word with the spaces after it.
_PARTS = re.compile(r"[\u2e80-\uffef]|[^\s\u2e80-\uffef]+\s*|\s+")


def format_rows(rows: Sequence[Sequence[str]]) -> str:
    """Align the cells of ``rows`` in columns, two spaces apart; untrusted text is escaped.

    They are never folded, so that cells can be copied and cut by other programs.
    """
    plain = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(count_columns, column)) for column in zip(*plain, strict=True)]
    return "\n".join(
        "  ".join(pad_cell(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in plain
    )


def count_columns(text: str) -> int:
    """Columns that ``text`` takes in a terminal; rich is imported only for wide characters."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pad_cell(text: str, width: int) -> str:
    """Pad ``text`` to ``width`` columns on the right, or to minus ``width`` on the left."""
    padding = " " * (abs(width) - count_columns(text))
    return text + padding if width > 0 else padding + text


def wrap_text(text: str, width: int) -> list[str]:
    """Wrap a text to ``width`` columns, at least 20: at words, and at any wide character."""
    width = max(20, width)
    if count_columns(text) == len(text):
        return textwrap.wrap(text, width) or [""]
    from rich.cells import chop_cells

    lines = [""]
    for part in _PARTS.findall(text):
        for piece in chop_cells(part, width):
            if count_columns(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece if lines[-1] else piece.lstrip()
    return [line.rstrip() for line in lines]
