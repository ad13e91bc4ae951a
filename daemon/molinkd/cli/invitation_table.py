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
from molinkd.cli.translation import tr
from molinkd.peer.command_line import join_instructions

#: Names in a sentence.
_MAX_NAMED = 8


def invitation_text(
    token: str, uses: int, format_command: Callable[[str], str], kind: Kind | None = None
) -> str:
    """Return instructions to add ``uses`` PCs by ``token``.

    ``kind`` is how molink is installed here, and so probably there too.
    """
    command, in_clone = f"  molink join {token}", (kind or find_installation().kind) == "clone"
    text = tr("To add up to {uses} PCs, install molink there and run this:", uses=uses)
    if in_clone:
        command = join_instructions(token)
        text = tr(
            "To add up to {uses} PCs, install molink there and run this in its folder:", uses=uses
        )
    if uses == 1:
        text = tr("To add a PC, install molink there and run this")
        if in_clone:
            text = tr("To add a PC, install molink there and run this in its folder")
        invite = format_command("invite")
        text += tr(" ({command} prints a token for another PC):", command=invite)
    return f"{text}\n\n{command}"


def show_invitations(
    invitations: Sequence[dict[str, Any]],
    format_command: Callable[[str], str] = "`molink {}`".format,
) -> None:
    """Print all invitations, oldest first."""
    console = Console(highlight=False)
    if not invitations:
        invite = format_command("invite")
        text = tr("There are no invitations; {command} creates one.", command=invite)
        console.print(text, markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(tr("id"), no_wrap=True)
    for column in (tr("made"), tr("by"), tr("expires"), tr("uses left"), tr("used by")):
        table.add_column(column)
    for one in invitations:
        used = ", ".join(f"{use['name']} ({_format_time(use['at'])})" for use in one["used"])
        cells = (
            one["id"],
            _format_time(one["created"]),
            one["creator"]["name"],
            _format_time(one["expires"]) if one["expires"] else tr("never"),
            tr("{left} of {uses}", left=one["left"], uses=one["uses"]),
            used or tr("nobody"),
        )
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    console.print(table)


def remaining_text(ended: RevokeReply) -> str:
    """Return sentences about members that a revocation concerns too; empty if none."""
    text = ""
    if ended.ended_peers:
        text += tr(" PCs that it let in are out too: {pcs}.", pcs=_join(ended.ended_peers))
    if ended.kept_peers:
        stay = _join(ended.kept_peers)
        text += tr(" PCs that joined with the same invitation stay: {pcs}.", pcs=stay)
    return text


def _join(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], *([tr("{count} more", count=rest)] if rest > 0 else [])])


def _format_time(unix: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    except (OverflowError, OSError, ValueError):
        return f"unix time {unix:.0f}"
