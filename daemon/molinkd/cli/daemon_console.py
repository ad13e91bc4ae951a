"""Terminal output of a daemon in the foreground."""

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from molink.plaintext import printable
from molink.swarm.membership.sanitize import quote_name
from molink.wire.messages.instructions import PendingPairing
from molinkd.cli.pairing_prompt import PairingPrompt, TypedLines
from molinkd.cli.transfer_line import TransferLine
from molinkd.peer.launch import (
    AnyDaemonEvent,
    DaemonStartedEvent,
    ModelFoundEvent,
    ModelReadinessChangedEvent,
    ModelUnavailableEvent,
    PairingsChangedEvent,
    ProblemReportedEvent,
    StageStatusChangedEvent,
    SwarmOpenedEvent,
    TransfersChangedEvent,
)


class DaemonConsole:
    """Prints a daemon's events."""

    def __init__(
        self,
        approve: Callable[[str], str] | None = None,
        *,
        foreground: bool = True,
        format_command: Callable[[str], str] = "`molink {}`".format,
    ) -> None:
        """``approve(code)`` approves a PC whose code is typed here; ``None`` disables input.

        ``foreground``: the daemon runs in this terminal. ``format_command`` is that of its
        ``Home``.
        """
        self._foreground, self._format_command = foreground, format_command
        self._pairing_prompt = (
            None if approve is None else PairingPrompt(approve, self.print_text, TypedLines())
        )
        self._console = Console(highlight=False, soft_wrap=True)
        self._shown_pairings: tuple[PendingPairing, ...] = ()
        self._transfers = TransferLine(self._console)

    def show_event(self, event: AnyDaemonEvent) -> None:
        """Print one event."""
        match event:
            case ModelFoundEvent():
                text = " (text only; images are not supported)" if event.is_text_only else ""
                if event.adapters:
                    text += f" with {escape(', '.join(event.adapters))}"
                named = f"[bold]{escape(event.model)}[/bold]{text}"
                self._print_markup(f"Serving {named} from {escape(event.path)}")
            case DaemonStartedEvent():
                self._show_listening(event)
            case SwarmOpenedEvent():
                self._show_opened(event)
            case PairingsChangedEvent():
                self._show_pairings(event)
            case StageStatusChangedEvent():
                self._print_markup(f"This PC: {escape(event.text)}")
            case TransfersChangedEvent():
                self._transfers.show_transfers(event.transfers)
            case ModelReadinessChangedEvent(ready=True):
                self._print_markup(f"[green]{escape(event.model)} is ready.[/green]")
            case ModelReadinessChangedEvent():
                text = (
                    f"{escape(event.model)} is interrupted; requests wait until it is ready again."
                )
                self._print_markup(f"[yellow]{text}[/yellow]")
            case ModelUnavailableEvent():
                model, reason = escape(event.model), escape(event.reason)
                self._print_markup(f"[yellow]{model} is not available yet: {reason}[/yellow]")
            case ProblemReportedEvent():
                self._print_markup(f"[red]error: {escape(event.text)}[/red]")

    def print_text(self, text: str) -> None:
        """Print a line."""
        self._print_markup(escape(text))

    def _show_pairings(self, event: PairingsChangedEvent) -> None:
        """Announce new pairing requests."""
        for one in event.pairings:
            if one not in self._shown_pairings:
                name, address = escape(quote_name(one.name)), escape(one.address)
                action = "type the code here, or run" if self._pairing_prompt is not None else "run"
                self._print_markup(
                    f"\n[bold]{name}[/bold] ({address}) wants to join with code "
                    f"[bold]{escape(one.code)}[/bold]. If that PC shows the same code, "
                    f"{action}\n\n  "
                    f"{escape(self._format_command(f'approve {one.code}').strip('`'))}\n"
                )
        self._shown_pairings = event.pairings
        if self._pairing_prompt is not None:
            self._pairing_prompt.set_pending(pending=bool(event.pairings))

    def _show_listening(self, event: DaemonStartedEvent) -> None:
        ends = ". Ctrl-C stops it" if self._foreground else ""
        self._print_markup(f"{escape(event.name)} is in swarm {escape(event.swarm)}{ends}.")
        manage = escape(self._format_command("page"))
        self._print_markup(
            f"Chat endpoint: [bold]{event.endpoint}/v1[/bold] (page: {event.endpoint}/; {manage} "
            "prints its address for managing the swarm)"
        )

    def _show_opened(self, event: SwarmOpenedEvent) -> None:
        """Say how to add a PC, without a token: it would stay on the screen."""
        invite = f"{self._format_command('invite')} prints a token"
        if event.discovery:
            text = "install molink there and run `molink join`: the PCs compare a code"
            text += f". {invite} for a PC of another network"
        else:
            text = f"{invite} for it"
        self._print_markup(f"\nTo add a PC, {escape(text)}.\n")

    def _print_markup(self, text: str) -> None:
        self._transfers.clear_line()
        self._console.print(printable(text, keep="\n"))
