"""Output of ``molink invite`` and of revoked invitations."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molink.plaintext import printable
from molink.wire.messages.admin import RevokeReply
from molinkd.cli.installation.kinds import Kind, find_installation
from molinkd.peer.command_line import join_instructions

#: Names in a sentence.
_MAX_NAMED = 8


def invitation_text(
    token: str, uses: int, format_command: Callable[[str], str], kind: Kind | None = None
) -> str:
    """Return instructions to add ``uses`` PCs by ``token``.

    ``kind`` is how molink is installed here, and so probably there too.
    """
    begin, more = f"To add up to {uses} PCs", ""
    if uses == 1:
        begin, more = (
            "To add a PC",
            f" ({format_command('invite')} prints a token for another PC)",
        )
    if (kind or find_installation().kind) != "clone":
        return f"{begin}, install molink there and run this{more}:\n\n  molink join {token}"
    command = join_instructions(token)
    return f"{begin}, install molink there and run this in its folder{more}:\n\n{command}"


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
    """Return sentences about members that a revocation concerns too; empty if none."""
    text = (
        f" PCs that it let in are out too: {_join(ended.ended_peers)}." if ended.ended_peers else ""
    )
    if ended.kept_peers:
        text += f" PCs that joined with the same invitation stay: {_join(ended.kept_peers)}."
    return text


def _join(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], *([f"{rest} more"] if rest > 0 else [])])


def _format_time(unix: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    except (OverflowError, OSError, ValueError):
        return f"unix time {unix:.0f}"
