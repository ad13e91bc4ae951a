"""Output of ``molink invite --list`` and of revoked invitations."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molink.plaintext import printable
from molink.wire.messages.admin import RevokeReply


def show_invitations(
    invitations: Sequence[dict[str, Any]],
    format_command: Callable[[str], str] = "`molink {}`".format,
) -> None:
    """Print all invitations, oldest first."""
    console = Console(highlight=False)
    if not invitations:
        console.print(
            f"There are no invitations; {format_command('invite')} creates one.", markup=False
        )
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("id", "made", "by", "expires", "uses left", "used by"):
        table.add_column(column, no_wrap=column == "id")
    for one in invitations:
        used = ", ".join(f"{use['name']} ({_format_time(use['at'])})" for use in one["used"])
        cells = (
            one["id"],
            _format_time(one["created"]),
            one["creator"]["name"],
            _format_time(one["expires"]) if one["expires"] else "never",
            f"{one['left']} of {one['uses']}",
            used or "nobody",
        )
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    console.print(table)


def remaining_text(ended: RevokeReply) -> str:
    """Return a sentence about members that joined by a revoked invitation; empty if none."""
    stayed = remaining_peers(ended)
    return f" PCs that joined with it stay: {', '.join(stayed)}." if stayed else ""


def remaining_peers(ended: RevokeReply) -> list[str]:
    """Return their names; the last entry counts those left out."""
    return [*ended.kept_peers, *([f"{ended.num_others} more"] if ended.num_others else [])]


def _format_time(unix: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    except (OverflowError, OSError, ValueError):
        return f"unix time {unix:.0f}"
