"""What a daemon in the foreground says on its terminal."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.segment import ControlType

from molink.plaintext import printable
from molink.swarm.throughput import eta
from molink.wire.messages.instructions import KnockingPc
from molink.wire.messages.reports import TransferState
from molinkd.cli.doorbell import Doorbell
from molinkd.cli.typed_lines import TypedLines
from molinkd.cli.units import long_time
from molinkd.peer.command_line import joining
from molinkd.peer.launch import (
    AnyEvent,
    Invitation,
    KnocksNow,
    Listening,
    ModelReady,
    NotServed,
    Serving,
    StageNow,
    Transferring,
    Trouble,
)

#: Where lines can't be rewritten, how far a transfer is is said this often, in seconds.
SAY_S = 5.0


def adding(token: str, uses: int, typed: Callable[[str], str]) -> str:
    """How so many PCs are added by ``token``; ``typed`` as in :class:`DaemonConsole`."""
    begin, more = f"To add up to {uses} PCs", ""
    if uses == 1:
        begin, more = "To add a PC", f" (for each further PC, {typed('invite')} prints a token)"
    return f"{begin}, install molink there and run this in its folder{more}:\n\n{joining(token)}"


def transfer_text(one: TransferState) -> str:
    """How far a transfer is, in a few words: bytes, rate, and how long it will take."""
    source = f" from {one.source}" if one.source else ""
    text = f"{one.model}{source}: {one.done / 1e6:.0f} of {one.total / 1e6:.0f} MB"
    seconds = eta(one.total - one.done, one.rate)
    if seconds is None:
        return text
    return f"{text}, {one.rate / 1e6:.1f} MB/s, {long_time(seconds)} left"


class TransferLine:
    """How far transfers are: one line that is rewritten on a terminal, else one now and then."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._standing = False
        self._said = float("-inf")

    def show(self, transfers: Sequence[TransferState]) -> None:
        """Say it; nothing if there are none."""
        self.clear()
        waited_for = [one for one in transfers if not one.copy]
        if not waited_for:
            return
        text = printable("Fetching " + "; ".join(map(transfer_text, waited_for)))
        if self._console.is_terminal:
            self._console.print(text[: self._console.width - 1], end="", markup=False)
            self._standing = True
        elif self._clock() - self._said >= SAY_S:
            self._console.print(text, markup=False)
            self._said = self._clock()

    def clear(self) -> None:
        """Take away the line that will be rewritten: something else is to be printed."""
        if self._standing:
            self._console.control(_BEGIN_ANEW)
            self._standing = False


_BEGIN_ANEW = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class DaemonConsole:
    """Prints a daemon's events for a person."""

    def __init__(
        self,
        approve: Callable[[str], str] | None = None,
        *,
        foreground: bool = True,
        typed: Callable[[str], str] = "`molink {}`".format,
    ) -> None:
        """``approve(code)`` lets a PC in whose code is typed here; ``None``: nobody can type.

        ``foreground``: the daemon runs in this terminal. ``typed`` is the ``Home.typed`` of its
        home.
        """
        self._foreground, self._typed = foreground, typed
        self._doorbell = None if approve is None else Doorbell(approve, self.say, TypedLines())
        self._console = Console(highlight=False, soft_wrap=True)
        self._known: tuple[KnockingPc, ...] = ()
        self._transfers = TransferLine(self._console)

    def show(self, event: AnyEvent) -> None:
        """Print one event."""
        match event:
            case Serving():
                text = ", its text model (it takes no images)" if event.sees else ""
                named = f"[bold]{escape(event.model)}[/bold]{text}"
                self._line(f"Serving {named} from {escape(event.path)}")
            case Listening():
                self._listening(event)
            case Invitation():
                self._line(f"\n{escape(adding(event.token, event.uses, self._typed))}\n")
                if event.discovery:
                    self._line(
                        "A PC of this network may leave the token out: it is let in by a code.\n"
                    )
            case KnocksNow():
                self._knocks(event)
            case StageNow():
                self._line(f"This PC: {escape(event.text)}")
            case Transferring():
                self._transfers.show(event.transfers)
            case ModelReady(ready=True):
                self._line(f"[green]{escape(event.model)} is ready.[/green]")
            case ModelReady():
                text = f"{escape(event.model)} is interrupted; requests wait until it is ready."
                self._line(f"[yellow]{text}[/yellow]")
            case NotServed():
                model, reason = escape(event.model), escape(event.reason)
                self._line(f"[yellow]{model} can't be served yet: {reason}[/yellow]")
            case Trouble():
                self._line(f"[red]molink: {escape(event.text)}[/red]")

    def say(self, text: str) -> None:
        """Print a line of our own."""
        self._line(escape(text))

    def _knocks(self, event: KnocksNow) -> None:
        """Say of those who have come that they are here."""
        for one in event.knocks:
            if one not in self._known:
                name, address = escape(one.name), escape(one.address)
                here = "type the code here, or run" if self._doorbell is not None else "run"
                self._line(
                    f"\n[bold]{name}[/bold] ({address}) wants to join. Does it show the code "
                    f"[bold]{escape(one.code)}[/bold]? Then {here}\n\n"
                    f"  {escape(self._typed(f'approve {one.code}').strip('`'))}\n"
                )
        self._known = event.knocks
        if self._doorbell is not None:
            self._doorbell.ring(somebody=bool(event.knocks))

    def _listening(self, event: Listening) -> None:
        ends = "; Ctrl-C stops it" if self._foreground else ""
        self._line(f"{escape(event.name)} is in swarm {escape(event.swarm)}{ends}.")
        self._line(f"Chat endpoint: [bold]{event.endpoint}/v1[/bold] (page: {event.endpoint}/)")

    def _line(self, text: str) -> None:
        self._transfers.clear()
        self._console.print(printable(text, keep="\n"))
