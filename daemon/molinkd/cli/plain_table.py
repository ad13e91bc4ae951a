"""Tables that are never folded, so that their cells can be copied and cut by other programs."""

from collections.abc import Sequence

from molink.plaintext import printable


def format_rows(rows: Sequence[Sequence[str]]) -> str:
    """Align the cells of ``rows`` in columns, two spaces apart; untrusted text is escaped."""
    plain = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in plain
    )
