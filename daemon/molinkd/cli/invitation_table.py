"""``molink invite --list`` for people, and what is said when an invitation ends."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molink.plaintext import printable
from molink.wire.messages.requests import RevokeReply


def show_invitations(
    invitations: Sequence[dict[str, Any]], typed: Callable[[str], str] = "`molink {}`".format
) -> None:
    """Print the invitations that there are, oldest first; ``typed`` as in ``Home.typed``."""
    console = Console(highlight=False)
    if not invitations:
        console.print(f"There are no invitations; {typed('invite')} makes one.", markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("id", "made", "by", "expires", "uses left", "used by"):
        table.add_column(column, no_wrap=column == "id")
    for one in invitations:
        used = ", ".join(f"{use['name']} ({_when(use['at'])})" for use in one["used"])
        cells = (
            one["id"],
            _when(one["created"]),
            one["creator"]["name"],
            _when(one["expires"]) if one["expires"] else "never",
            f"{one['left']} of {one['uses']}",
            used or "nobody",
        )
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    console.print(table)


def who_stays(ended: RevokeReply) -> str:
    """The sentence about members that came by what has ended; empty if there are none."""
    stayed = named(ended)
    return f" Who came by it stays: {', '.join(stayed)}." if stayed else ""


def named(ended: RevokeReply) -> list[str]:
    """Their names; of many the last entry says how many more there are."""
    return [*ended.stayed, *([f"{ended.others} more"] if ended.others else [])]


def _when(unix: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    except (OverflowError, OSError, ValueError):
        return f"unix time {unix:.0f}"
