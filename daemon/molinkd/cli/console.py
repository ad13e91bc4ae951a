"""What a daemon in the foreground says on its terminal."""

from rich.console import Console
from rich.markup import escape

from molink.plaintext import printable
from molinkd.peer.launch import (
    AnyEvent,
    Invitation,
    Listening,
    ModelReady,
    NotServed,
    Serving,
    StageNow,
    Trouble,
)


def adding(uses: int) -> str:
    """What comes before a join token for so many PCs."""
    if uses == 1:
        return "To add a PC, run this there (for each further PC, `molink invite` prints a token):"
    return f"To add up to {uses} PCs, run there:"


class DaemonConsole:
    """Prints a daemon's events for a person."""

    def __init__(self, *, foreground: bool = True) -> None:
        """``foreground``: the daemon runs in this terminal."""
        self._foreground = foreground
        self._console = Console(highlight=False, soft_wrap=True)

    def show(self, event: AnyEvent) -> None:
        """Print one event."""
        match event:
            case Serving():
                self._line(f"Serving [bold]{escape(event.model)}[/bold] from {escape(event.path)}")
            case Listening():
                self._listening(event)
            case Invitation():
                self._line(f"\n{adding(event.uses)}\n")
                self._line(f"  molink join {escape(event.token)}\n")
            case StageNow():
                self._line(f"This PC: {escape(event.text)}")
            case ModelReady(ready=True):
                self._line(f"[green]{escape(event.model)} is ready.[/green]")
            case ModelReady():
                model = escape(event.model)
                self._line(f"[yellow]{model}: layers are being moved; requests wait.[/yellow]")
            case NotServed():
                model, reason = escape(event.model), escape(event.reason)
                self._line(f"[yellow]{model} can't be served yet: {reason}[/yellow]")
            case Trouble():
                self._line(f"[red]molink: {escape(event.text)}[/red]")

    def say(self, text: str) -> None:
        """Print a line of our own."""
        self._line(escape(text))

    def _listening(self, event: Listening) -> None:
        ends = "; Ctrl-C stops it" if self._foreground else ""
        self._line(f"{escape(event.name)} is in swarm {escape(event.swarm)}{ends}.")
        self._line(f"Chat endpoint: [bold]{event.endpoint}/v1[/bold] (page: {event.endpoint}/)")

    def _line(self, text: str) -> None:
        self._console.print(printable(text, keep="\n"))
